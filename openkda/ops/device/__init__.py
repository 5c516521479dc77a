"""What the machine can run (`api.py`), without importing any kernel language."""
