"""Backends of estimators, which take a matrix: scikit-learn, XGBoost, LightGBM."""
