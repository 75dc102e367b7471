"""Reader for the texts of plays. The users of the data set are the speakers or the plays."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import models
from manifoldagg.experiments.readers import read_text, with_model
from manifoldagg.simulation.dataset import LabelledDataset

__all__ = ["PLAY_OPENINGS", "shakespeare"]

SHAKESPEARE_FILES = ("input.txt", "shakespeare.txt")
"""The possible names of a text of plays in a folder."""
USERS = ("speaker", "play")
PLAY_OPENINGS: Mapping[str, tuple[str, str]] = {
    "Coriolanus": ("First Citizen", "Before we proceed any further, hear me speak."),
    "Richard III": ("GLOUCESTER", "Now is the winter of our discontent"),
    "Richard II": ("KING RICHARD II", "Old John of Gaunt, time-honour'd Lancaster,"),
    "Romeo and Juliet": ("SAMPSON", "Gregory, o' my word, we'll not carry coals."),
    "Henry VI, Part 3": ("WARWICK", "I wonder how the king escaped our hands."),
    "The Winter's Tale": ("ARCHIDAMUS", "If you shall chance, Camillo, to visit Bohemia, on"),
    "Measure for Measure": ("DUKE VINCENTIO", "Escalus."),
    "The Taming of the Shrew": ("SLY", "I'll pheeze you, in faith."),
    "The Tempest": ("Master", "Boatswain!"),
}
"""The speaker and the first line of the first speech, for each of the nine plays in tiny Shakespeare."""


def shakespeare(path: Path | str, length: int = 80, users: str = "speaker") -> LabelledDataset:
    """Load a text of plays. The users are the speakers, or the plays.

    The model is a recurrent network (GRU) that predicts the next character.

    A speech begins with the speaker's name and a colon on one line, and ends at an empty line. The speeches of a
    speaker are joined and split into sequences. Incomplete sequences are omitted. Tokens are the sorted characters.

    The source of the plays is one of these:

    - a text of several plays, such as `input.txt` of tiny Shakespeare, which has no titles. With `users="play"`, a play
      begins at its first speech in [`PLAY_OPENINGS`][manifoldagg.experiments.plays.PLAY_OPENINGS], the nine plays of
      tiny Shakespeare. A play that is not in this table is counted as a part of the play before it.
    - a folder of `.txt` files with one play each. The speakers are the roles of each play, so that messengers of two
      plays are two speakers.

    For the plays of LEAF, see [`leaf`][manifoldagg.experiments.datasets.leaf].

    Args:
        path: the path of the text, of a folder with `input.txt` or `shakespeare.txt`, or of a folder of plays.
        length: the number of characters in a sequence.
        users: the users of the natural partition, `"speaker"` or `"play"`. With `"play"`, the sequences are cut by
            speaker within each play.

    Raises:
        ArgumentError: if an argument or a file is invalid, no speaker has `length` + 1 characters, or a text with
            `users="play"` does not begin with the first speech of a known play.

    Source: the text of char-rnn, "tiny Shakespeare". The split by speaker is that of McMahan et al. 2017, and the split
    by play that of Manifold B.2.
    """
    check_count("length", length)
    check_choice("users", users, USERS)
    texts, several = _read_plays(Path(path))
    said: dict[tuple[str, str], list[str]] = {}
    for title, text in texts.items():
        play = title
        for speaker, words in _speeches(text):
            if users == "play" and several:
                play = _opened_play(speaker, words) or play
                if play == title:
                    raise ArgumentError(
                        f"path: {title}: expected the first speech of one of {', '.join(PLAY_OPENINGS)}, got a speech "
                        f"of {speaker}; for other plays, expected a folder with a file for each play"
                    )
            said.setdefault((play, speaker), []).append(words)
    number = {character: i for i, character in enumerate(sorted(set("".join(texts.values()))))}
    pieces: list[Tensor] = []
    owners: list[int] = []
    known: dict[str | tuple[str, str], int] = {}
    for role, speeches in said.items():
        tokens = torch.tensor([number[character] for character in "\n".join(speeches)], dtype=torch.int64)
        count = (len(tokens) - 1) // length
        if count > 0:
            # A row has one token more than a sequence, because the last token is only a label.
            pieces.append(torch.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)]))
            owners += [known.setdefault(role[0] if users == "play" else role, len(known))] * count
    if not pieces:
        raise ArgumentError(
            f"path: {next(iter(texts))}: expected speeches under lines 'Name:', of {length + 1} characters or more"
        )
    cut = torch.cat(pieces)
    return with_model("shakespeare", cut[:, :-1], cut[:, 1:], models.gru, target=0.4, user_ids=torch.tensor(owners))


def _read_plays(place: Path) -> tuple[dict[str, str], bool]:
    """Read the texts by path, and return whether a single text contains several plays."""
    names = [place / name for name in SHAKESPEARE_FILES if (place / name).is_file()] if place.is_dir() else [place]
    if names:
        return {str(names[0]): read_text(names[0])}, True
    files = sorted(place.glob("*.txt"))
    if not files:
        raise ArgumentError(f"path: {place}: expected a file {' or '.join(SHAKESPEARE_FILES)}, or plays in .txt files")
    return {str(file): read_text(file) for file in files}, False


def _speeches(text: str) -> Iterator[tuple[str, str]]:
    """Yield the speaker and the words of each speech."""
    for speech in text.split("\n\n"):
        name, colon, words = speech.strip("\n").partition(":\n")
        if colon and "\n" not in name:
            yield name, words


def _opened_play(speaker: str, words: str) -> str | None:
    """Return the play that a speech opens."""
    opening = speaker, words.partition("\n")[0]
    return next((play for play, first in PLAY_OPENINGS.items() if first == opening), None)
