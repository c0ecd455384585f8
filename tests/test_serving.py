"""`transformers serve` with saved folders and the `openai` client, `transformers chat`, pipelines and streamers."""

import concurrent.futures
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, pipeline

from engine_matrix import for_engine
from tiny import VOCABULARY, tiny_config, tiny_model
from whatwhere import WhatWhereGPT2ForCausalLM, WhatWhereLlamaForCausalLM

MISSING = "what `transformers serve` needs is not installed: pip install -e '.[test]'"
pytest.importorskip("fastapi", reason=MISSING)
pytest.importorskip("uvicorn", reason=MISSING)
openai = pytest.importorskip("openai", reason=MISSING)
# In the remote-code server the package does not exist.
REMOTE = "import sys; sys.modules['whatwhere'] = None; from transformers.cli.transformers import main; main()"
PACKAGE = "import whatwhere; from transformers.cli.transformers import main; main()"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}. {% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
QUESTION = [{"role": "user", "content": "who are you"}]
LENGTH = 12


def letters():
    """A tokenizer of one token for each character, so that every text that a model writes can be compared."""
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:?!"
    words = ["<pad>", "<s>", "</s>", *characters]
    assert len(words) == VOCABULARY
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Folders:
    """Saved models with the tokenizer above, made when they are first asked for; what they generate themselves."""

    def __init__(self, root):
        self.root, self.models, self.tokenizer = root, {}, letters()

    def path(self, encoding):
        folder = self.root / encoding
        if encoding not in self.models:
            # No token ends a text: its length is the one that was asked for.
            model = tiny_model("llama", encoding, max_position_embeddings=128, eos_token_id=None)
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            self.models[encoding] = model
        return str(folder)

    def answer(self, encoding, prompt, length=LENGTH):
        self.path(encoding)
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        found = self.models[encoding].generate(ids, max_new_tokens=length, do_sample=False)
        return self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)

    def question(self, messages=QUESTION):
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


class Server:
    """A server in a process of its own, and a client of it."""

    def __init__(self, start, folder, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "server.log"
        names = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), "HF_HOME": str(folder / "home")}
        options = ["serve", *options, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, *options], env={**os.environ, **names}, cwd=folder, stdout=log, stderr=log
            )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def wait(self):
        end = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=10)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert time.monotonic() < end, self.log.read_text()[-3000:]
                time.sleep(0.1)

    def stop(self):
        self.client.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(REMOTE, tmp_path_factory.mktemp("server"), "--trust-remote-code")
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def text_of(server, folder, prompt, length=LENGTH, **options):
    """What the server completes a prompt with, and why it stopped."""
    options = {"max_tokens": length, "temperature": 0, **options}
    (choice,) = server.client.completions.create(model=folder, prompt=prompt, **options).choices
    return choice.text, choice.finish_reason


def check_all_ways(server, folders, encoding):
    """The server writes what `generate` writes, for each of its interfaces, at once and as a stream."""
    folder, client = folders.path(encoding), server.client
    expected = folders.answer(encoding, "hello")
    assert text_of(server, folder, "hello") == (expected, "length")
    common = {"model": folder, "temperature": 0}
    stream = client.completions.create(prompt="hello", max_tokens=LENGTH, stream=True, **common)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    expected = folders.answer(encoding, folders.question())
    found = client.chat.completions.create(messages=QUESTION, max_tokens=LENGTH, **common)
    assert found.choices[0].message.content == expected
    assert found.usage.completion_tokens == LENGTH
    stream = client.chat.completions.create(messages=QUESTION, max_tokens=LENGTH, stream=True, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    given = {"input": QUESTION, "max_output_tokens": LENGTH}
    assert client.responses.create(stream=False, **given, **common).output_text == expected
    events = client.responses.create(stream=True, **given, **common)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected


@for_engine("serve", ("rope", "pope", "cope"))
def test_every_encoding_is_served(server, folders, encoding, expected):
    assert expected == "works"
    check_all_ways(server, folders, encoding)


@pytest.mark.slow
def test_the_package_is_served_without_remote_code(tmp_path, folders):
    server = Server(PACKAGE, tmp_path, folders.path("cope"))
    try:
        server.wait()
        check_all_ways(server, folders, "cope")
        with pytest.raises(openai.BadRequestError) as refused:
            text_of(server, folders.path("rope"), "hello")
        assert "Server is pinned to" in refused.value.body["detail"]
    finally:
        server.stop()


@pytest.mark.parametrize("architecture", [WhatWhereLlamaForCausalLM, WhatWhereGPT2ForCausalLM])
def test_the_class_that_engines_look_for(folders, architecture):
    found = getattr(transformers, architecture.__name__)
    # vLLM and SGLang ask.
    assert issubclass(found, transformers.PreTrainedModel)
    assert found.is_backend_compatible() == architecture.is_backend_compatible()
    assert type(found.from_pretrained(folders.path("cope"))) is WhatWhereLlamaForCausalLM
    family = "gpt2" if "GPT2" in architecture.__name__ else "llama"
    assert type(found(tiny_config(family, "rope"))) is architecture
    with pytest.raises(ValueError, match="is not supported for position_encoding='cope'"):
        found.from_pretrained(folders.path("cope"), attn_implementation="sdpa")


def test_eight_requests_at_once(server, folders):
    prompts = ["a", "hello", "who are you", "x" * 40, "The end.", "What?", "to be, or not", "Z"]
    cases = [(encoding, prompt) for encoding, prompt in zip(["cope", "rope"] * 4, prompts)]
    expected = [folders.answer(encoding, prompt) for encoding, prompt in cases]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda case: text_of(server, folders.path(case[0]), case[1])[0], cases))
    assert found == expected


@pytest.mark.parametrize("encoding", ["absolute", "relative"])
@pytest.mark.parametrize("prompt", ["a" * 200, "a" * 120], ids=["prompt", "answer"])
def test_too_long_is_refused_in_our_words(server, folders, encoding, prompt):
    """A prompt beyond the encoding's length, or an answer that grows beyond it."""
    client, common = server.client, {"model": folders.path(encoding), "temperature": 0}
    message = f"tokens is longer than position_encoding='{encoding}' supports (128 tokens). Shorten it"
    messages = [{"role": "user", "content": prompt}]
    calls = {
        client.completions: {"prompt": prompt, "max_tokens": 20},
        client.chat.completions: {"messages": messages, "max_tokens": 20},
        client.responses: {"input": messages, "max_output_tokens": 20},
    }
    for interface, given in calls.items():
        with pytest.raises(openai.BadRequestError) as refused:
            interface.create(stream=False, **given, **common)
        assert message in refused.value.body["detail"]
    for interface in (client.completions, client.chat.completions):
        with pytest.raises(openai.APIError) as refused:
            list(interface.create(stream=True, **calls[interface], **common))
        assert message in refused.value.body
    *_, last = client.responses.create(stream=True, **calls[client.responses], **common)
    assert last.type == "response.failed"
    assert message in last.response.error.message
    # The server goes on.
    assert text_of(server, folders.path(encoding), "hello")[0] == folders.answer(encoding, "hello")


def test_transformers_chat(server, folders, tmp_path):
    # The Hub's client connects to the server. No other address is used.
    names = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_ENDPOINT": server.url, "COLUMNS": "200"}
    chat = ["chat", folders.path("cope"), f"{server.url}/v1", f"max_new_tokens={LENGTH}", "do_sample=False"]
    done = subprocess.run(
        [sys.executable, "-m", "transformers.cli.transformers", *chat],
        # The answer is cut off, which `chat` asks about.
        input="who are you\nn\n!exit\n",
        env={**os.environ, **names},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Markdown may change the blanks.
    expected = folders.answer("cope", folders.question())
    assert expected.replace(" ", "") in done.stdout.replace(" ", ""), done.stdout


@pytest.mark.parametrize("encoding", ["pope", "cope", "relative"])
def test_pipeline_and_streamer(folders, encoding):
    writer = pipeline("text-generation", model=folders.path(encoding), trust_remote_code=True, device="cpu")
    options = {"max_new_tokens": LENGTH, "do_sample": False, "return_full_text": False}
    prompts = ["hello", "a longer prompt", "x"]
    # Padded on the left by the pipeline.
    writer.tokenizer.padding_side = "left"
    for prompt, (found,) in zip(prompts, writer(prompts, batch_size=3, **options)):
        assert found["generated_text"] == folders.answer(encoding, prompt)
    (found,) = writer(QUESTION, **options)
    assert found["generated_text"] == folders.answer(encoding, folders.question())
    streamer = TextIteratorStreamer(folders.tokenizer, skip_prompt=True, timeout=60)
    inputs = {"input_ids": folders.tokenizer("hello", return_tensors="pt").input_ids, "streamer": streamer}
    thread = threading.Thread(
        target=writer.model.generate, kwargs={**inputs, "max_new_tokens": LENGTH, "do_sample": False}
    )
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == folders.answer(encoding, "hello")
    assert len(pieces) > 2
