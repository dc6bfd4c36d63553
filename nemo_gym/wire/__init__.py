"""What travels between agents, model servers and model backends, and the client that carries it.

`items.py` and `responses.py` hold the Responses API, `chat.py` Chat Completions, `conversion.py` and `tokens.py`
what lies between the two, `backend.py` the HTTP client. Environments import from `nemo_gym.openai_utils`.

The models are pydantic models of our own rather than subclasses of the `openai` package's: importing that
package costs more than importing FastAPI, in every server process. The tests validate payloads through both
sets of models in both directions, so ours can't drift from the official ones. They are also more patient:
fields and items they don't know are kept and passed on, because a trajectory that lost an item can't be
trained on.
"""
