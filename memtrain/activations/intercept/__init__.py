"""Around a forward: hooks on the modules, and a mode that runs every op as the plan says."""
