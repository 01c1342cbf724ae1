"""`ocgpu serve`: the arbitration proxy."""
