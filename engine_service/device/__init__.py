"""The device ring: torch, never gRPC. Runs in the rank workers alone."""
