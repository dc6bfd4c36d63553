"""What the processes of a deployment write to their logs: one line a record, where it comes from, and no secret.

`logging` is used as ever; this package is what stands at its end. Each process of a deployment calls
`set_up_process_log`, and a command `command_log`. What a line says of the session and the rollout that are being
served stands in context variables, which the servers' middleware fills.
"""

from nemo_gym.logs.context import (
    ROLLOUT_HEADER as ROLLOUT_HEADER,
    rollout_id as rollout_id,
    session_id as session_id,
    trace_id as trace_id,
)
from nemo_gym.logs.lines import (
    TRACEBACK_MARK as TRACEBACK_MARK,
    ReadLine as ReadLine,
    read_line as read_line,
)
from nemo_gym.logs.redaction import (
    Redactor as Redactor,
    beginning_of as beginning_of,
)
from nemo_gym.logs.setup import (
    command_log as command_log,
    end_process_log as end_process_log,
    name_worker as name_worker,
    set_up_process_log as set_up_process_log,
)
