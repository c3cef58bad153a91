"""Decisions: policies as filter, score, pick over a snapshot of the fleet. Pure and synchronous."""
