"""Event simulation of a prefill/decode fleet behind the real router core and the real policies."""
