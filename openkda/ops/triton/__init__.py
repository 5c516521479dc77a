"""Device functions that the Triton kernels of several ops share (`api.py`)."""
