"""Programs in this folder that run in environments of their own, with packages that are not here."""

collect_ignore = ["chart_objects.py", "ray_cluster.py"]
