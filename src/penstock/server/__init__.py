"""The HTTP process: routes, workers' life, queues, metrics. Never imports torch."""
