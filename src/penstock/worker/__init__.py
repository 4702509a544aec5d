"""The process of one loaded model."""
