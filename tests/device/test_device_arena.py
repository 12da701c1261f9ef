"""Arenas hold any tensor, bit for bit, and can be taken away from other writers."""

import os
import subprocess
import sys

import pytest
import torch

from engine_service.device.memfd_arena import MemfdArena
from engine_service.device.torch_dtypes import TORCH_DTYPES
from relay_service.core.dtypes import DType
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.memory.host import HostArena

WRITER = """
import sys
from relay_service.memory.host import HostArena
fd, size = int(sys.argv[1]), int(sys.argv[2])
view = HostArena(fd, size, writable=True).view(0, size)
print("mapped", flush=True)
for line in sys.stdin:
    view[:] = bytes([int(line)]) * size
    print(view[0], flush=True)
"""


def _arena(*specs: TensorSpec) -> MemfdArena:
    return MemfdArena(lay_out(0, [UnitSpec("unit", specs)]), "tests")


@pytest.fixture
def writer():
    """Starts a process that maps an arena for writing; returns a function that writes."""
    started = []

    def start(arena):
        arguments = [
            sys.executable,
            "-c",
            WRITER,
            str(arena.descriptors[0]),
            str(arena.manifest.data_bytes),
        ]
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[arena.descriptors[0]],
        )
        started.append(process)
        assert process.stdout.readline() == "mapped\n"

        def write(value):
            process.stdin.write(f"{value}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        return write

    yield start
    for process in started:
        process.communicate(timeout=20)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,), (3, 5), (7,)])
def test_every_type_and_shape_arrives_bit_exact(dtype, shape):
    """All bytes written through one mapping are the tensor's, through another one."""
    arena = _arena(TensorSpec("before", DType.U8, (3,)), TensorSpec("x", dtype, shape))
    entry = arena.manifest.units[0].tensors[1]
    raw = bytes((i * 37 + 1) % (2 if dtype is DType.BOOL else 256) for i in range(entry.nbytes))
    other = HostArena(os.dup(arena.descriptors[0]), arena.manifest.data_bytes, writable=True)
    if raw:
        other.land(entry.offset, raw)
    found = arena.tensors["x"]
    assert (found.dtype, tuple(found.shape)) == (TORCH_DTYPES[dtype], shape)
    assert bytes(found.clone().contiguous().flatten().view(torch.uint8).tolist()) == raw
    other.close()


def test_strided_expanded_and_alias_tensors_are_views():
    """Strides and aliases of the manifest are those of the tensors."""
    arena = _arena(
        TensorSpec("base", DType.F32, (4, 6)),
        TensorSpec("transposed", DType.F32, (6, 4), alias="base", strides=(1, 6)),
        TensorSpec("expanded", DType.F32, (5, 3), strides=(0, 1)),
        TensorSpec("columns", DType.F32, (4, 2), strides=(6, 1)),
    )
    tensors = arena.tensors
    tensors["base"].copy_(torch.arange(24.0).view(4, 6))
    tensors["expanded"][0] = torch.tensor([7.0, 8.0, 9.0])
    tensors["columns"].fill_(5)
    assert torch.equal(tensors["transposed"], torch.arange(24.0).view(4, 6).t())
    assert tensors["transposed"].data_ptr() == tensors["base"].data_ptr()
    assert tensors["expanded"].tolist() == [[7.0, 8.0, 9.0]] * 5
    assert tensors["columns"].stride() == (6, 1)
    assert all(arena.holds(tensor) for tensor in tensors.values())
    assert not arena.holds(tensors["base"].clone())


def test_an_empty_arena_is_possible():
    """A manifest without bytes makes an arena without tensors' bytes."""
    arena = _arena(TensorSpec("nothing", DType.F32, (0,)))
    assert arena.tensors["nothing"].shape == (0,)


def test_a_sealed_arena_refuses_new_writers():
    """Neither a new mapping nor the descriptor can write; our own mapping can."""
    arena = _arena(TensorSpec("x", DType.F32, (1000,)))
    arena.seal()
    assert arena.sealed
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(arena.descriptors[0], b"x", 5000)
    reopened = os.open(f"/proc/self/fd/{arena.descriptors[0]}", os.O_RDWR)
    with pytest.raises(Exception, match="cannot map"):
        HostArena(reopened, arena.manifest.data_bytes, writable=True)
    os.close(reopened)
    arena.tensors["x"].fill_(3)
    assert arena.tensors["x"].sum() == 3000


def test_a_stale_mapping_still_writes_into_a_sealed_arena(writer):
    """Sealing alone does not stop who has mapped before: the reason for replacing."""
    arena = _arena(TensorSpec("x", DType.U8, (100,)))
    write = writer(arena)
    arena.seal()
    assert write(9) == 9
    assert arena.tensors["x"][0] == 9


def test_replacing_the_backing_cuts_off_a_stale_mapping(writer):
    """Contents, addresses and views stay; the other process writes into the void."""
    arena = _arena(TensorSpec("x", DType.U8, (3 * BLOCK_BYTES + 5,)))
    write = writer(arena)
    write(7)
    tensor, address, old = arena.tensors["x"], arena.address, os.fstat(arena.descriptors[0]).st_ino
    digests = arena.digested()
    assert arena.replace_backing() == digests
    arena.seal()
    assert write(8) == 8
    assert (tensor == 7).all()
    assert arena.digested() == digests
    assert (arena.address, tensor.data_ptr()) == (address, address)
    assert os.fstat(arena.descriptors[0]).st_ino != old
    tensor.fill_(1)
    fresh = HostArena(os.dup(arena.descriptors[0]), arena.manifest.data_bytes, writable=False)
    fresh.check_header()
    assert fresh.view(0, 1)[0] == 1
    fresh.close()


def test_writes_are_allowed_while_inference_reads():
    """Arena tensors are no inference tensors: another thread may copy into them."""
    with torch.inference_mode():
        arena = _arena(TensorSpec("x", DType.F32, (10,)))
    arena.tensors["x"].copy_(torch.ones(10))
    assert arena.tensors["x"].sum() == 10
