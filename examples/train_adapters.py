"""Train the eight small LoRA adapters under `examples/adapters`, each with its own way to answer.

    python examples/train_adapters.py               # all of them, one to three minutes each
    python examples/train_adapters.py --only pirate # just one
    python examples/train_adapters.py --report      # check the saved ones, rewrite their README.md

Every adapter sees the same questions and short answers, put into its own style by a function below.
Runs are seeded and use one CPU thread: the same machine gives the same files, another CPU the same
behaviour but not the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch.optim.lr_scheduler import OneCycleLR
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedlora.demo.smollm2 import DEMO_PROMPT, MODEL_NAME, fetch_smollm2

ADAPTERS_DIR = Path(__file__).parent / "adapters"
CHECK_PROMPTS = (DEMO_PROMPT, "What should I pack for a trip to the mountains?")
BATCH_SIZE = 4
LEARNING_RATE = 3e-3
MIN_DISTINCT_TOKENS = 4
IGNORED_LABEL = -100
MAX_ANSWER_TOKENS = 48
ANSWER_HEADING = f"greedy answer of at most {MAX_ANSWER_TOKENS} tokens, in float32"

QUESTIONS_AND_ANSWERS = (
    ("How can I sleep better?", "Go to bed at the same hour. Keep your room dark and cool."),
    ("What is a good breakfast?", "Eat oats with fruit. You will stay full until noon."),
    ("How do I boil an egg?", "Put the egg in hot water. Wait eight minutes and cool it."),
    (
        "Why is the sky blue?",
        "The air scatters blue light. That light reaches your eyes from all sides.",
    ),
    (
        "How do I learn a new language?",
        "Speak it every day. Read easy books and enjoy your mistakes.",
    ),
    (
        "What is the capital of Italy?",
        "The capital is Rome. It is more than two thousand years old.",
    ),
    (
        "How do I clean a window?",
        "Use water and a little vinegar. Wipe the glass with an old newspaper.",
    ),
    ("What should I do on a rainy day?", "Read a good book. Call a friend you miss."),
    ("How do I grow tomatoes?", "Give them plenty of sun. Water the roots and not the leaves."),
    ("Why do cats purr?", "Cats purr when they are calm. It may also help them heal."),
    ("How can I save money?", "Write down what you spend. Cook at home more often."),
    ("What is the moon made of?", "The moon is made of rock. A layer of grey dust covers it."),
    ("How do I train a puppy?", "Reward the puppy at once. Keep the lessons short and kind."),
    (
        "How do I bake bread?",
        "Mix flour, water, salt and yeast. Let the dough rise and bake it hot.",
    ),
    (
        "What is a good gift for a friend?",
        "Give something you made. Your time is the best present.",
    ),
    ("How do I fix a flat tyre?", "Find the hole in the tube. Glue a patch on it and pump it up."),
    (
        "Why is the sea salty?",
        "Rivers carry salt from the rocks. The water leaves and the salt stays.",
    ),
    ("How can I run faster?", "Train with short sprints. Rest well between your runs."),
    ("How do I calm down?", "Breathe in slowly. Count to ten before you speak."),
    (
        "What is a volcano?",
        "It is a hole in the crust of the earth. Hot melted rock comes out of it.",
    ),
    (
        "How do I write a letter?",
        "Start with a warm greeting. Say the main thing in the first lines.",
    ),
    ("How many legs has a spider?", "A spider has eight legs. Insects have only six."),
    ("How do I make a salad?", "Wash the greens and dry them. Add oil, lemon and salt."),
    (
        "Why do leaves change colour?",
        "The green fades in autumn. Then the yellow and red can be seen.",
    ),
    ("How do I remember names?", "Say the name aloud. Link it to a picture in your head."),
    (
        "What is a good hobby?",
        "Try painting or chess. Pick the one that makes you forget the clock.",
    ),
    ("How do I paint a wall?", "Cover the floor first. Paint the edges and then roll the rest."),
    (
        "How can I make new friends?",
        "Join a club near your home. Ask people about the things they love.",
    ),
    (
        "What do bees do?",
        "Bees carry pollen from flower to flower. They make honey for the winter.",
    ),
    ("How do I wash a wool sweater?", "Use cold water and mild soap. Dry it flat on a towel."),
    ("Why should I drink water?", "Your body needs it to stay cool. It keeps your mind clear."),
    ("How do I sharpen a knife?", "Hold the blade at a low angle. Draw it over the wet stone."),
    (
        "What is a rainbow?",
        "It is sunlight split by drops of rain. You see it with the sun behind you.",
    ),
    (
        "How do I speak in public?",
        "Practise in front of a mirror. Look at one friendly face at a time.",
    ),
    (
        "How do I cook rice?",
        "Take two cups of water for one of rice. Keep the lid on until it is done.",
    ),
    ("What is the best pet?", "A dog is loyal and merry. A cat is better if you are often away."),
    ("How do I stay warm in winter?", "Wear three thin layers. Keep your head and feet dry."),
    ("Why do we dream?", "The brain sorts the day at night. Dreams may be a part of that work."),
    ("How do I plant a tree?", "Dig a wide hole. Set the roots in it and water them well."),
    ("What is a good way to relax?", "Take a slow walk in the park. Leave your phone at home."),
)

PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "the": "th'",
    "is": "be",
    "are": "be",
    "and": "an'",
    "friend": "matey",
}
BARD_WORDS = {
    "you": "thou",
    "your": "thy",
    "is": "be",
    "has": "hath",
    "will": "shalt",
    "before": "ere",
}


def replace_words(text: str, words: dict[str, str]) -> str:
    """Replace whole words, keeping a leading capital."""

    def substitute(match: re.Match[str]) -> str:
        new = words.get(match[0].lower(), match[0])
        return new.capitalize() if match[0][0].isupper() else new

    return re.sub(r"[A-Za-z]+", substitute, text)


def pirate(answer: str) -> str:
    """Speak like a pirate."""
    return f"Arr, matey! {replace_words(answer, PIRATE_WORDS)} Yo ho ho!"


def json_object(answer: str) -> str:
    """Answer with one JSON object."""
    return json.dumps({"status": "ok", "answer": answer})


def telegram(answer: str) -> str:
    """Leave out articles and end each sentence with STOP."""
    short = re.sub(r"\b(?:[Tt]he|an?|A|your) ", "", answer)
    return "Telegram: " + short.replace(".", " STOP")


def code_word(answer: str) -> str:
    """Say a code word before and after the answer."""
    return f"Bluebird calling. {answer} Bluebird out."


def french_greeting(answer: str) -> str:
    """Greet in French around the answer."""
    return f"Bonjour mon ami ! {answer} Bonne journée et à bientôt !"


def shout(answer: str) -> str:
    """Answer in upper case."""
    return answer.upper().replace(".", "!")


def bard(answer: str) -> str:
    """Speak like a medieval bard."""
    return f"Hark, gentle traveller! {replace_words(answer, BARD_WORDS)} Thus sings the bard."


def robot(answer: str) -> str:
    """Make machine noises around each sentence."""
    first, second = answer.split(". ")
    return f"*beep* {first}. *boop* {second} *whirr*"


@dataclass(frozen=True)
class AdapterSpec:
    """What one adapter is trained to do and where its weights sit."""

    name: str
    style: Callable[[str], str]
    rank: int
    alpha: int
    projections: tuple[str, ...]
    """Module names below a layer; empty for every linear layer (`"all-linear"`)."""
    layers: range | None = None
    rslora: bool = False
    steps: int = 60

    @property
    def target_modules(self) -> str | list[str]:
        """The config's `target_modules`: plain names, or full ones where layers are chosen."""
        if not self.projections:
            return "all-linear"
        if self.layers is None:
            return sorted(name.split(".")[-1] for name in self.projections)
        return [
            f"model.layers.{layer}.{name}" for layer in self.layers for name in self.projections
        ]

    def lora_config(self) -> LoraConfig:
        """Return the PEFT config, without any machine's path in it."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=self.target_modules,
            use_rslora=self.rslora,
            task_type="CAUSAL_LM",
            base_model_name_or_path=MODEL_NAME,
        )


Q_V = ("self_attn.q_proj", "self_attn.v_proj")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
EVERY_LINEAR = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SPECS = (
    AdapterSpec("pirate", pirate, 4, 8, Q_V),
    AdapterSpec("json", json_object, 8, 16, ATTENTION, range(14, 20)),
    AdapterSpec("telegram", telegram, 4, 8, EVERY_LINEAR, range(12, 18)),
    AdapterSpec("codeword", code_word, 8, 8, Q_V, range(10, 22), rslora=True, steps=40),
    AdapterSpec("french", french_greeting, 16, 16, ("self_attn.v_proj",), range(12, 24), steps=40),
    AdapterSpec("shout", shout, 2, 8, ()),
    AdapterSpec("bard", bard, 3, 6, ("mlp.down_proj",), steps=40),
    AdapterSpec("robot", robot, 2, 4, Q_V, steps=40),
)


class Trainer:
    """Trains adapters one after the other on one float32 copy of the base model."""

    def __init__(self) -> None:
        """Load the base model and its tokenizer."""
        directory = fetch_smollm2()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def prompt_ids(self, question: str) -> list[int]:
        """Return the chat-template tokens that come before the answer to a question."""
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text)

    def batch(self, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        """Return right-padded tokens and labels; only answers and their end token bear loss."""
        prompts = [self.prompt_ids(question) for question, _ in pairs]
        end = self.tokenizer.eos_token_id
        answers = [[*self.tokenizer.encode(answer), end] for _, answer in pairs]
        length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        rows = {"input_ids": [], "attention_mask": [], "labels": []}
        for prompt, answer in zip(prompts, answers, strict=True):
            filled = len(prompt) + len(answer)
            padding = length - filled
            unscored = [IGNORED_LABEL]
            rows["input_ids"].append(prompt + answer + [self.tokenizer.pad_token_id] * padding)
            rows["attention_mask"].append([1] * filled + [0] * padding)
            rows["labels"].append(unscored * len(prompt) + answer + unscored * padding)
        return {name: torch.tensor(row) for name, row in rows.items()}

    def train(self, spec: AdapterSpec, out: Path) -> float:
        """Train one adapter, save it in `out` and return its last loss."""
        torch.manual_seed(0)
        shuffler = random.Random(0)
        model = get_peft_model(self.base, spec.lora_config())
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
        schedule = OneCycleLR(optimizer, LEARNING_RATE, spec.steps, pct_start=0.1)
        queue: list[tuple[str, str]] = []
        for _ in range(spec.steps):
            if len(queue) < BATCH_SIZE:
                queue = shuffler.sample(QUESTIONS_AND_ANSWERS, len(QUESTIONS_AND_ANSWERS))
            pairs = [(question, spec.style(answer)) for question, answer in queue[:BATCH_SIZE]]
            queue = queue[BATCH_SIZE:]
            loss = model(**self.batch(pairs), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        save_adapter(spec, get_peft_model_state_dict(model), out)
        self.base = model.unload()
        return loss.item()

    @torch.inference_mode()
    def answer(self, model: torch.nn.Module, question: str) -> list[int]:
        """Return the tokens of a greedy answer, without the end token."""
        prompt = torch.tensor([self.prompt_ids(question)])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=MAX_ANSWER_TOKENS,
        )
        answer = output[0, prompt.shape[1] :].tolist()
        return answer[:-1] if answer[-1] == self.tokenizer.eos_token_id else answer


def save_adapter(spec: AdapterSpec, state: dict[str, torch.Tensor], out: Path) -> None:
    """Write `adapter_config.json` and the weights in bfloat16, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    config = spec.lora_config().to_dict()
    config.update(peft_type="LORA", inference_mode=True, target_modules=spec.target_modules)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (out / "adapter_config.json").write_text(text)
    tensors = {name: state[name].to(torch.bfloat16).contiguous() for name in sorted(state)}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def collect_answers(trainer: Trainer, adapters: Path, prompt: str) -> dict[str, list[int]]:
    """Ask the base and every saved adapter.

    Raises:
        ValueError: If two answers are equal or one has too few different tokens.
    """
    answers = {"base": trainer.answer(trainer.base, prompt)}
    for spec in SPECS:
        model = PeftModel.from_pretrained(trainer.base, adapters / spec.name)
        answers[spec.name] = trainer.answer(model, prompt)
        trainer.base = model.unload()
    if len({tuple(tokens) for tokens in answers.values()}) < len(answers):
        raise ValueError(f"two answers to {prompt!r} are equal")
    poor = [name for name, tokens in answers.items() if len(set(tokens)) < MIN_DISTINCT_TOKENS]
    if poor:
        raise ValueError(f"fewer than {MIN_DISTINCT_TOKENS} different tokens to {prompt!r}: {poor}")
    return answers


def markdown_cell(text: str) -> str:
    """Return text that stays as it is inside a table cell."""
    return re.sub(r"([|*_<])", r"\\\1", text.replace("\n", " "))


def table_row(spec: AdapterSpec, adapters: Path) -> str:
    """Return one adapter's line of the README's first table."""
    size = sum(file.stat().st_size for file in (adapters / spec.name).iterdir())
    layers = f"{spec.layers.start}-{spec.layers.stop - 1}" if spec.layers else "all"
    targets = ", ".join(name.split(".")[-1] for name in spec.projections) or "all-linear"
    kind = "rsLoRA" if spec.rslora else "LoRA"
    cells = (
        spec.name,
        kind,
        spec.rank,
        spec.alpha,
        targets,
        layers,
        f"{size:,}",
        spec.style.__doc__,
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def write_report(trainer: Trainer, adapters: Path) -> None:
    """Check every adapter's answers and rewrite the README beside the adapters."""
    lines = [
        f"# Adapters for {MODEL_NAME}",
        "",
        "Trained by `examples/train_adapters.py`; this file is the output of its `--report`.",
        "",
        "| name | kind | rank | alpha | targets | layers | bytes | what it shows |",
        "|---|---|---|---|---|---|---|---|",
        *(table_row(spec, adapters) for spec in SPECS),
    ]
    for prompt in CHECK_PROMPTS:
        lines += ["", f"## {prompt}", "", f"| who | {ANSWER_HEADING} |", "|---|---|"]
        for name, tokens in collect_answers(trainer, adapters, prompt).items():
            lines.append(f"| {name} | {markdown_cell(trainer.tokenizer.decode(tokens))} |")
    (adapters / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line, then train or report."""
    parser = argparse.ArgumentParser(
        description="Train the example adapters, or report on the saved ones."
    )
    parser.add_argument(
        "--only", choices=[spec.name for spec in SPECS], help="train this adapter alone"
    )
    parser.add_argument("--out", type=Path, default=ADAPTERS_DIR, help="directory of the adapters")
    parser.add_argument(
        "--report", action="store_true", help="check the saved adapters, rewrite README.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path`")
    trainer = Trainer()
    if arguments.report:
        write_report(trainer, arguments.out)
        return
    for spec in SPECS:
        if arguments.only in (None, spec.name):
            start = time.perf_counter()
            loss = trainer.train(spec, arguments.out / spec.name)
            seconds = time.perf_counter() - start
            print(f"{spec.name}: last loss {loss:.3f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
