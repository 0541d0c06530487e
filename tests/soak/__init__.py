"""Much and large: writes, documents, tasks, threads, records; small in CI, at full length by `make soak`."""
