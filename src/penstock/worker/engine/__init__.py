"""From a plan to tokens: batch, runner, sampler."""
