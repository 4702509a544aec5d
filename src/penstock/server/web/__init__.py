"""The page at `/`: its files, and signing in. What it shows comes from the admin API."""
