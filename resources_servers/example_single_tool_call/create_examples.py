"""Write `data/example.jsonl`: questions about the weather in one city, in various words."""

import json
from pathlib import Path

OUTPUT = Path(__file__).parent / "data" / "example.jsonl"

TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Current weather in a city: temperature, warm or cold, sun, rain, snow, wind.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city."}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]

QUESTIONS = [
    ("What's the weather in Paris?", "Paris"),
    ("Can you tell me the weather for New York right now?", "New York"),
    ("How is the weather in Rio de Janeiro today?", "Rio de Janeiro"),
    ("Is it raining in São Paulo at the moment?", "São Paulo"),
    ("I fly to Reykjavík tomorrow. How cold is it in Reykjavík?", "Reykjavík"),
    ("weather in oslo please", "Oslo"),
    ("Tokyo's temperature, please.", "Tokyo"),
    ("Please look up the current weather for Cape Town.", "Cape Town"),
    ("Should I expect snow in Helsinki?", "Helsinki"),
    ("How strong is the wind in Wellington?", "Wellington"),
    ("Find out what the weather is like in St. Louis, Missouri.", "St. Louis"),
    ("Good morning! Is there any sun in Lisbon?", "Lisbon"),
]


def main() -> None:
    """Write the file."""
    with OUTPUT.open("w", encoding="utf-8") as file:
        for number, (question, city) in enumerate(QUESTIONS):
            params = {"input": [{"role": "user", "content": question}], "tools": TOOLS, "parallel_tool_calls": False}
            row = {"id": f"weather-{number:02d}", "responses_create_params": params, "expected_city": city}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
