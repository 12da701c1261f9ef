"""A rank's device without one: the driver is a fake, torch computes on the CPU."""

import functools

import torch
from fake_cuda import FakeDriver

from engine_service.device.cuda_arena import CudaArena
from engine_service.device.cuda_graphs import CudaGraphRunner
from engine_service.device.devices import Device
from engine_service.device.meeting import meet_over_gloo
from relay_service.memory.staging import host_bytes


def as_tensor(memory):
    """Returns the fake device's memory, which is the host's."""
    return torch.frombuffer(host_bytes(memory.address, memory.data_bytes), dtype=torch.uint8)


def rerun(forward):
    """Captures nothing: runs the pass again, on the inputs that it was bound to."""
    logits = forward().clone()
    return lambda: logits.copy_(forward()), logits


def arena_on(driver, manifest, generation="tests"):
    """Returns an arena on the first device of a driver."""
    return CudaArena(manifest, generation, driver=driver, device=0, as_tensor=as_tensor)


def fake_device(driver: FakeDriver) -> Device:
    """Returns all that a rank on CUDA is made of, but CUDA."""
    return Device(
        torch.device("cpu"),
        functools.partial(arena_on, driver),
        functools.partial(CudaGraphRunner, record=rerun),
        meet_over_gloo,
    )
