"""A request from conversation to answer: tokens, admission, queue, generation, parts."""
