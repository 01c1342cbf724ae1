"""What the proxy costs beside nginx, Go's ReverseProxy and no proxy: `python -m benches.proxy`."""
