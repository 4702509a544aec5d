"""Prompts of given lengths for a real model: prose, code and several languages, always the same.

A prompt is cut from its text in token ids, so its length is exact; where the text is too short it
goes on with numbered repetitions, which keeps a long prompt from being one loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

# Around the edges of a block (16), of a step (64, 512), and up to where attention is most of it.
LENGTHS = (
    1, 2, 7, 15, 16, 17, 31, 33, 48, 63, 65, 100, 127, 200, 256, 300, 511, 800, 1200, 1500,
)  # fmt: skip

TEXTS = (
    "The river had been rising since the morning, and by noon the lower gate could no longer be "
    "seen. Maren climbed the stairs of the power house, counting the turbines by their sound: "
    "three of them steady, the fourth a little slow, as it had been all winter. ",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n"
    '    """Two sorted lists as one."""\n'
    "    merged = []\n"
    "    while left and right:\n"
    "        merged.append(left.pop(0) if left[0] <= right[0] else right.pop(0))\n"
    "    return merged + left + right\n\n",
    "Le barrage retient l'eau de l'hiver; au printemps, on ouvre les vannes peu à peu, pour que "
    "la vallée ne soit jamais surprise. Les habitants du village connaissent ce bruit. ",
    "Das Wasser fällt durch ein Rohr auf die Turbine, und nur so viel, wie sie tragen kann. "
    "Wer das Tor zu weit öffnet, verliert beides: das Wasser und die Maschine. ",
    "El canal baja desde la montaña hasta los campos. Cada familia recibe el agua por turnos, y "
    "el encargado anota en un cuaderno la hora y la cantidad. ",
    "水はゆっくりと谷を下り、水門の前で止まる。番人は毎朝その高さを測り、帳面に書きつける。",
    "Вода поднялась до края плотины, и сторож каждое утро записывает её уровень. Весной он "
    "открывает затворы понемногу, чтобы никого не застать врасплох. ",
    "الماء يجري في القناة من الجبل إلى الحقول، ولكل بيت ساعة معلومة. ",
    "INSERT INTO levels (gate, measured_at, metres) VALUES ('north', '2024-03-01', 12.75);\n"
    "SELECT gate, max(metres) FROM levels GROUP BY gate HAVING max(metres) > 10;\n",
    "Question: A reservoir holds 4800 cubic metres and loses 75 an hour. After how many hours is "
    "it half empty? Answer, step by step: ",
)


def build(tokenizer: Path, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """A prompt of each length, over the texts in turn."""
    encoder = Tokenizer.from_file(str(tokenizer))
    return [_cut(encoder, TEXTS[i % len(TEXTS)], size) for i, size in enumerate(lengths)]


def _cut(encoder: Tokenizer, text: str, length: int) -> list[int]:
    ids: list[int] = []
    part = 1
    while len(ids) < length:
        heading = f"{part}. " if part > 1 else ""
        ids += encoder.encode(heading + text, add_special_tokens=False).ids
        part += 1
    return ids[:length]
