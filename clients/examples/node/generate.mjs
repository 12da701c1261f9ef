// Streams an answer of an engine and prints its text.
//
//   node generate.mjs HOST:PORT PROMPT [MAX_TOKENS]
//
// PROTOS names the folder of the .proto files; they stand beside this example otherwise.

import { fileURLToPath } from "node:url";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";

const DEADLINE_SECONDS = 60;

const [address, prompt, maxTokens = "32"] = process.argv.slice(2);
if (!address || !prompt) {
  console.error("usage: node generate.mjs HOST:PORT PROMPT [MAX_TOKENS]");
  process.exit(2);
}

const protos = process.env.PROTOS ?? fileURLToPath(new URL("../../../protos", import.meta.url));
const definition = loader.loadSync("seedrelay/v1/engine.proto", {
  includeDirs: [protos],
  longs: String,
  enums: String,
  defaults: true, // unset text is empty text
});
const { EngineService } = grpc.loadPackageDefinition(definition).seedrelay.v1;
const client = new EngineService(address, grpc.credentials.createInsecure());

const request = { text: prompt, sampling: { maxTokens: Number(maxTokens) } };
const call = client.generate(request, { deadline: Date.now() + DEADLINE_SECONDS * 1000 });
call.on("data", ({ text }) => process.stdout.write(text));
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
  client.close();
});
call.on("end", () => client.close());
