"""How a contended core is split, schedule beside schedule: `python -m benches.sharing`."""
