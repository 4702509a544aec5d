"""Fakes and tiny models for tests of penstock and of what is built on it."""
