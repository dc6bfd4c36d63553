"""An agent that remembers, per session, all it was told."""

from fastapi import Body, HTTPException, Request
from pydantic import PrivateAttr

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import SESSION_ID_KEY, get_response_json, raise_for_status


class NotebookAgent(SimpleResponsesAPIAgent):
    """Answers with everything that its session was told so far."""

    _pages: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    async def responses(  # type: ignore[override]
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming = Body()
    ) -> NeMoGymResponse:
        """Add a page and read out all."""
        if not isinstance(body.input, str):
            raise HTTPException(422, "a page is a text")
        pages = self._pages.setdefault(request.session[SESSION_ID_KEY], [])
        pages.append(body.input)
        return NeMoGymResponse.model_validate(
            {
                "id": "resp_1",
                "created_at": 0,
                "model": "notebook",
                "output": [
                    {
                        "type": "message",
                        "id": "msg_1",
                        "role": "assistant",
                        "status": "completed",
                        "content": [{"type": "output_text", "text": " ".join(pages), "annotations": []}],
                    }
                ],
            }
        )

    async def run(self, request: Request, body: BaseRunRequest = Body()) -> BaseVerifyResponse:  # type: ignore[override]
        """Call itself, over HTTP, in the session of the caller; the reward is the number of pages."""
        reply = await self.call_self(request, "/v1/responses", json=body.responses_create_params)
        await raise_for_status(reply)
        response = NeMoGymResponse.model_validate(await get_response_json(reply))
        return BaseVerifyResponse(**dict(body), response=response, reward=len(response.output_text.split()))


if __name__ == "__main__":
    NotebookAgent.run_webserver()
