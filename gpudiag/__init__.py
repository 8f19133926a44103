"""gpudiag: why the GPU is not busy with useful work, what to change, and what the change will bring."""

__version__ = "0.1.0"
