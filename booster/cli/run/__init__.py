"""`booster run`: starts one process per rank on one or several nodes, and reports how they ended."""
