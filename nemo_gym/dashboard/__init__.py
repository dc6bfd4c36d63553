"""The dashboard: a page on the head server that shows what a deployment is doing.

`running_dashboard` asks the servers for their figures for as long as its context is open, and gives the head server
its routes. docs/dashboard.md shows what is seen there.
"""

from nemo_gym.dashboard.board import running_dashboard as running_dashboard
