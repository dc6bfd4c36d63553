"""The parent of server processes: starts them, watches them, and leaves none behind.

`Deployment` runs the servers of one configuration; `StopSignals` turns Ctrl-C and its kin into an orderly end;
`RunRecord` is how other commands find a running deployment.
"""

from nemo_gym.deployment.process import ServerProcess as ServerProcess
from nemo_gym.deployment.records import RunRecord as RunRecord, running_deployments as running_deployments
from nemo_gym.deployment.signals import StopSignals as StopSignals
from nemo_gym.deployment.supervisor import Deployment as Deployment, ServerEvent as ServerEvent
