"""Scheduling: which tokens each step computes, and the engine that runs steps. No torch."""
