"""The parts of `eldr demo`: workload, client, measurement, comparison with references, table, conductor."""
