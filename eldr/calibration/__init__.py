"""Calibration: counts of real requests, the fit, and the profile that routing reads.

`profile` needs NumPy only; `fit`, `kmeans` and `assignment` need SciPy.
"""
