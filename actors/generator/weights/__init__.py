"""New policy versions on their way into the engine: fetched once per host, verified, and loaded."""
