"""Pure functions on tensors, one folder an op. Each folder's `api.py` is its contract."""
