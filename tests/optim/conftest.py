"""The programs that tests start as processes of their own are no tests."""

collect_ignore = ["distributed.py", "sharded.py", "sharded_checkpoints.py"]
