"""One module for each engine, with ``load(folder, threads) -> System``; imported in a worker process only."""
