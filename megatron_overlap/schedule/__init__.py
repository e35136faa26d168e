"""Pipeline schedules as checked lists of actions."""
