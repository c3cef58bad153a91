"""Expert-aware decode routing for mixture-of-experts models (arXiv 2607.00466)."""
