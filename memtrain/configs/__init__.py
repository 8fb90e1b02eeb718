"""The YAML files that Hydra composes; they ship inside the wheel."""
