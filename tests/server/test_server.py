"""The server on a real port, with OpenAI's own client."""
import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from trueup.core.cli import main
from trueup.core.engine import Engine, EngineConfig
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedModel
from trueup.models import LLM
from trueup.server import create_app
from trueup.server.serve import Server
from trueup.server.worker import EngineFailed, Worker

NANO = "glm-4.7-flash-nano"
PROMPTS = ["def add(a, b):\n    ", "import os\n\nclass "]
TRUEUP = str(Path(sys.executable).with_name("trueup"))
GO_ON = {"ignore_eos": True}


@pytest.fixture(scope="module")
def alone():
    """The same model in an engine of its own: what each text has to be."""
    return LLM.from_pretrained(NANO, progress=False)


@contextmanager
def serving(llm):
    """A server in a thread; at the end it has to shut down cleanly, with every page free."""
    app = create_app(llm)
    server = Server(uvicorn.Config(app, log_level="error"), app.state.worker, grace=0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
    assert not thread.is_alive() and not app.state.worker.running
    assert llm.engine.pages.free == llm.engine.config.num_pages - 1 and not llm.engine.has_work


@pytest.fixture
def url(alone):
    with serving(LLM(alone.model, alone.tokenizer, NANO)) as url:
        yield url


def client(url, kind=openai.OpenAI):
    return kind(base_url=url + "/v1", api_key="none", max_retries=0)


def health(url):
    return httpx.get(url + "/health").json()


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_two_streams_share_a_batch_and_each_writes_what_generate_writes(url, alone):
    async def stream(api, prompt):
        chunks = await api.completions.create(
            model=NANO, prompt=prompt, max_tokens=100, temperature=0, stream=True, extra_body=GO_ON
        )
        return [chunk.choices[0] async for chunk in chunks]

    async def both():
        async with client(url, openai.AsyncOpenAI) as api:
            return await asyncio.gather(*(stream(api, prompt) for prompt in PROMPTS))

    for prompt, chunks in zip(PROMPTS, asyncio.run(both()), strict=True):
        expected = alone.generate(prompt, SamplingParams(max_tokens=100, ignore_eos=True))[0]
        assert "".join(chunk.text for chunk in chunks) == expected.text and len(chunks) > 20
        assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "length"]
    after = health(url)
    assert after["largest_batch"] == 2 and after["rounds"] < 190  # one after the other would be 200


def test_a_list_of_prompts_is_one_answer_with_a_choice_each(url, alone):
    answer = client(url).completions.create(
        model=NANO, prompt=PROMPTS, max_tokens=12, temperature=0.7, seed=5, extra_body=GO_ON
    )
    expected = alone.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.7, seed=5, ignore_eos=True))
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (i, c.text, c.finish_reason) for i, c in enumerate(expected)
    ]
    prompt_tokens = sum(c.prompt_tokens for c in expected)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 24)
    assert answer.usage.total_tokens == prompt_tokens + 24 and answer.object == "text_completion"


def test_token_ids_are_a_prompt_and_defaults_are_openais(url, alone):
    ids = alone.tokenizer.encode(PROMPTS[0])
    expected = alone.generate(PROMPTS[0], SamplingParams(max_tokens=16, temperature=1.0, seed=9))[0]
    for prompt in (ids, [ids]):
        answer = client(url).completions.create(model=NANO, prompt=prompt, seed=9)
        assert answer.choices[0].text == expected.text


def test_a_stream_of_several_prompts_with_usage(url, alone):
    texts = ["", ""]
    *chunks, last = client(url).completions.create(
        model=NANO, prompt=PROMPTS, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True},
        extra_body=GO_ON,
    )
    for chunk in chunks:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in alone.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))]
    assert last.choices == [] and last.usage.completion_tokens == 16


def test_events_end_with_done(url):
    body = {"model": NANO, "prompt": "x", "max_tokens": 2, "stream": True}
    lines = [line for line in httpx.post(url + "/v1/completions", json=body).text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"


def test_models_are_listed(url):
    assert [(m.id, m.owned_by) for m in client(url).models.list()] == [(NANO, "trueup")]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(url, stream):
    body = {"model": NANO, "prompt": PROMPTS, "max_tokens": 2000, "stream": stream, **GO_ON}
    asking = _streams if stream else _gives_up
    with asking(url + "/v1/completions", body):
        wait_for(lambda: health(url)["rounds"] > 3)
        assert health(url)["requests"] == 2
    wait_for(lambda: health(url)["requests"] == 0)
    after = health(url)
    assert after["free_pages"] == after["pages"] and after["rounds"] < 1500
    time.sleep(0.1)
    assert health(url)["rounds"] == after["rounds"]


@contextmanager
def _streams(url, body):
    """Asks for a stream, and hangs up when the block ends."""
    with httpx.stream("POST", url, json=body):
        yield


@contextmanager
def _gives_up(url, body):
    """Asks for an answer that takes longer than this client waits."""

    def ask():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=1.5)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    thread.join()


def test_a_full_engine_queues(alone):
    llm = LLM(alone.model, alone.tokenizer, NANO, EngineConfig(max_requests=1, buckets=(1,)))

    async def three(url):
        async with client(url, openai.AsyncOpenAI) as api:
            return await asyncio.gather(*(
                api.completions.create(model=NANO, prompt=PROMPTS[0], max_tokens=10, temperature=0, extra_body=GO_ON)
                for _ in range(3)
            ))

    with serving(llm) as url:
        answers = asyncio.run(three(url))
        assert health(url)["largest_batch"] == 1
    expected = alone.generate(PROMPTS[0], SamplingParams(max_tokens=10, ignore_eos=True))[0].text
    assert [a.choices[0].text for a in answers] == [expected] * 3


def test_what_is_wrong_is_400_and_names_the_field(url):
    ok = {"model": NANO, "prompt": "x"}
    wrong = {
        "prompt": ["", [], ["x", ""], [[]], [1, -1], [99999], 7, [1, "x"], [True], [1] * 3000],
        "max_tokens": [0, -1, "5", 1.5],
        "temperature": [-1, "hot"],
        "seed": ["one"],
        "stream": ["yes"],
        **{"n": [2, 0], "best_of": [2], "echo": [True], "logprobs": [0, 1], "suffix": ["y"], "stop": ["y", ["y"]]},
        **{"top_p": [0.5], "presence_penalty": [1], "frequency_penalty": [0.1], "logit_bias": [{"5": 1}]},
        **{"top_k": [1], "guided_regex": ["a*"]},
    }
    with httpx.Client(base_url=url + "/v1") as web:
        for field, values in wrong.items():
            for value in values:
                answer = web.post("/completions", json={**ok, field: value})
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["param"] == field, (field, value, error)
                assert error["type"] == "invalid_request_error" and error["message"], (field, value, error)
        missing = web.post("/completions", json={"model": NANO})
        assert missing.status_code == 400 and missing.json()["error"]["param"] == "prompt"
        garbled = web.post("/completions", content=b"{", headers={"content-type": "application/json"})
        assert garbled.status_code == 400 and "not valid JSON" in garbled.json()["error"]["message"]
        assert web.post("/completions", json=[1]).status_code == 400
        assert "error" in web.get("/nowhere").json() and web.get("/completions").json()["error"]["type"]
        # What these fields are without effect at is no mistake, and the server is as well as before.
        neutral = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "stop": None, "top_p": 1.0, "user": "me",
                   "presence_penalty": 0, "logit_bias": {}, "suffix": None, "stream_options": None, "max_tokens": None}
        assert web.post("/completions", json={**ok, **neutral}).status_code == 200


def test_errors_reach_openais_client_as_its_own(url, alone):
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist; this server has") as caught:
        client(url).completions.create(model="gpt", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    small = LLM(alone.model, alone.tokenizer, NANO, EngineConfig(num_pages=3, page_size=16))
    with serving(small) as other, pytest.raises(openai.BadRequestError, match=r"need 7 pages of 16; the pool has 2"):
        client(other).completions.create(model=NANO, prompt="x", max_tokens=100)


def test_a_failing_engine_answers_500_and_goes_on(alone, monkeypatch):
    llm = LLM(alone.model, alone.tokenizer, NANO)
    with serving(llm) as url:
        stream = client(url).completions.create(model=NANO, prompt="x", max_tokens=2000, stream=True, extra_body=GO_ON)
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(llm.model, "logits", lambda hidden: hidden[:, :0].argmax(-1))
            with pytest.raises(openai.APIError, match="the engine failed: "):
                list(stream)
            with pytest.raises(openai.InternalServerError, match="the engine failed: "):
                client(url).completions.create(model=NANO, prompt="x")
        assert client(url).completions.create(model=NANO, prompt="x").choices


def test_a_stream_that_runs_at_shutdown_ends_with_an_error(alone):
    with serving(LLM(alone.model, alone.tokenizer, NANO)) as url:
        stream = client(url).completions.create(model=NANO, prompt="x", max_tokens=2000, stream=True, extra_body=GO_ON)
        next(stream)
    with pytest.raises(openai.APIError, match="the engine has stopped"):
        list(stream)


def test_stopping_the_worker_fails_what_is_unfinished_and_what_comes_later():
    worker = Worker(Engine(ScriptedModel()))

    async def use():
        with pytest.raises(EngineFailed, match="not running"):
            await worker.submit([[1]], SamplingParams())
        worker.start()
        long = await worker.submit([[1, 2], [3]], SamplingParams(max_tokens=4000))
        await asyncio.to_thread(worker.stop)
        with pytest.raises(EngineFailed, match="the engine has stopped"):
            async for _ in long:
                pass
        with pytest.raises(EngineFailed, match="not running"):
            await worker.submit([[1]], SamplingParams())

    asyncio.run(asyncio.wait_for(use(), 10))
    assert worker.engine.pages.free == worker.engine.config.num_pages - 1


def test_an_abort_right_behind_a_submission_is_heard():
    worker = Worker(Engine(ScriptedModel()))
    worker.start()

    async def use():
        task = asyncio.create_task(worker.submit([[1, 2]], SamplingParams(max_tokens=4000)))
        await asyncio.sleep(0)  # the submission is queued, its acceptance not yet heard
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(use())
    wait_for(lambda: worker.unfinished == 0 and worker.engine.pages.free == worker.engine.config.num_pages - 1)
    worker.stop()


@pytest.mark.parametrize("port", [None, 70000])
def test_a_port_that_cannot_be_had_is_one_line_and_exit_code_2(port, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = port or other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"trueup: cannot listen on 127.0.0.1:{port}: ")


def test_trueup_serve_writes_what_trueup_generate_writes(capsys):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    server = subprocess.Popen([TRUEUP, "serve", "--port", "0"], **pipes)
    try:
        assert main(["generate", PROMPTS[0], "--json", "--max-tokens", "16"]) == 0
        generated = json.loads(capsys.readouterr().out)
        assert NANO in server.stderr.readline()
        url = server.stderr.readline().strip().removesuffix("/v1")
        wait_for(lambda: httpx.get(url + "/health").status_code == 200)
        answer = client(url).completions.create(model=NANO, prompt=PROMPTS[0], temperature=0)
        assert answer.choices[0].text == generated["text"]
    finally:
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=10)
    assert (server.returncode, out, err) == (0, "", "")
