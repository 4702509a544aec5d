"""The admin API: what operators read and change."""
