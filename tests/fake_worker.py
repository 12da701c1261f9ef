"""A rank's process on a device that is a fake: `python tests/fake_worker.py FD [FD]`."""

from fake_cuda import FakeDriver
from fake_device import fake_device

from engine_service.device import devices, worker

if __name__ == "__main__":
    devices._open_cuda = lambda _: fake_device(FakeDriver())
    worker.main()
