"""Fuzz targets for the parts of the request path that only compute, and what runs them."""
