import json
import pickle
import struct
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import load_dataset, models
from manifoldagg.experiments.datasets import FASHION_MNIST_FOLDER
from manifoldagg.experiments.models import Signature
from manifoldagg.experiments.plays import PLAY_OPENINGS
from manifoldagg.experiments.workloads import partition
from manifoldagg.federated import clients, rules
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import FederatedDataset, LabelledDataset, Method, iid_partition, natural_partition, run

PLAY = """Romeo:
But soft, what light.

Juliet:
Ay me!

Romeo:
She speaks.

A stage direction without a speaker.
"""


def write_idx(folder, part, count, side=28):
    generator = np.random.default_rng(count)
    pixels = generator.integers(0, 256, (count, side, side), dtype=np.uint8)
    labels = np.arange(count, dtype=np.uint8) % 10
    head = struct.pack(">BBBB", 0, 0, 8, 3) + struct.pack(">III", *pixels.shape)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels.tobytes())
    return pixels, labels


def test_an_idx_folder_with_train_and_t10k_files_has_a_test_split(tmp_path):
    folder = tmp_path / "fashion"
    folder.mkdir()
    pixels, labels = write_idx(folder, "train", 30)
    alone = load_dataset(f"idx:{folder}")
    assert alone.test_mask is None
    assert alone.name == "fashion"
    write_idx(folder, "t10k", 20)
    both = load_dataset(f"idx:{folder}")
    assert both.test_mask.tolist() == [False] * 30 + [True] * 20
    np.testing.assert_array_equal((both.inputs[:30, 0] * 255).round().numpy(), pixels)
    np.testing.assert_array_equal(both.labels[:30].numpy(), labels)
    assert len(load_dataset(f"idx:{folder},part=train").labels) == 30
    assert both.model()(both.inputs[:2]).shape == (2, 10)


def test_fashion_mnist_is_read_from_the_files_of_the_debian_package(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    write_idx(folder, "train", 30)
    write_idx(folder, "t10k", 20)
    dataset = load_dataset(f"fashion-mnist:{folder}")
    assert (dataset.name, len(dataset.labels), int(dataset.test_mask.sum())) == ("fashion-mnist", 50, 20)
    if not Path(FASHION_MNIST_FOLDER).is_dir():
        with pytest.raises(ArgumentError, match="apt-get install dataset-fashion-mnist"):
            load_dataset("fashion-mnist")
        pytest.skip("the package dataset-fashion-mnist is not installed")
    dataset = load_dataset("fashion-mnist")
    assert dataset.inputs.shape == (70_000, 1, 28, 28)
    assert dataset.test_mask.sum() == 10_000
    assert torch.bincount(dataset.labels).tolist() == [7000] * 10


def test_the_test_split_of_the_data_is_the_held_out_set(tmp_path):
    write_idx(tmp_path, "train", 60)
    write_idx(tmp_path, "t10k", 40)
    made = load_dataset(f"idx:{tmp_path}")
    federation = FederatedDataset.split(made, 4, partition=iid_partition, seed=0)
    assert sorted(np.concatenate(federation.train)) == list(range(60))
    assert sorted(np.concatenate(federation.held_out)) == list(range(60, 100))
    with pytest.raises(ArgumentError, match="holdout: expected None"):
        FederatedDataset.split(made, 4, partition=iid_partition, seed=0, holdout=0.2)


def test_speeches_are_joined_by_speaker_and_labels_are_the_next_characters(tmp_path):
    (tmp_path / "input.txt").write_text(PLAY)
    made = load_dataset(f"shakespeare:{tmp_path},length=5")
    letters = sorted(set(PLAY))
    said = [
        "".join(letters[i] for i in [*x.tolist(), y[-1].item()]) for x, y in zip(made.inputs, made.labels, strict=True)
    ]
    whole = ["But soft, what light.\nShe speaks.", "Ay me!"]
    expected = [text[i : i + 6] for text in whole for i in range(0, len(text) - 5, 5)]
    assert said == expected
    assert made.user_ids.tolist() == [0] * 6 + [1]
    assert torch.equal(made.inputs[:, 1:], made.labels[:, :-1])
    with pytest.raises(ArgumentError, match="of 101 characters or more"):
        load_dataset(f"shakespeare:{tmp_path},length=100")


def test_plays_start_at_their_first_speeches(tmp_path):
    openings = list(PLAY_OPENINGS.items())[:3]
    speeches = [f"{name}:\n{line}\nAnd more." for _, (name, line) in openings]
    (tmp_path / "input.txt").write_text("\n\n".join(f"{one}\n\nMessenger:\nNews for you." for one in speeches))
    made = load_dataset(f"shakespeare:{tmp_path},length=5,users=play")
    letters = sorted(set((tmp_path / "input.txt").read_text()))
    by_play = ["", "", ""]
    for x, play in zip(made.inputs, made.user_ids.tolist(), strict=True):
        by_play[play] += "".join(letters[i] for i in x.tolist())
    for text, (_, (_, line)) in zip(by_play, openings, strict=True):
        assert text.startswith(line)
        assert text.endswith("News for y")
    # If the users are speakers, the messengers of the three plays are one user.
    speakers = load_dataset(f"shakespeare:{tmp_path},length=5").user_ids
    assert torch.bincount(speakers).shape == (4,)
    federation = FederatedDataset.split(made, 2, partition=partition("natural:clients=2"), seed=0)
    used = np.concatenate([*federation.train, *federation.held_out])
    assert sorted(used.tolist()) == list(range(len(made.labels)))


def test_each_file_of_a_folder_is_one_play(tmp_path):
    for title in ("hamlet", "macbeth"):
        (tmp_path / f"{title}.txt").write_text(f"Messenger:\nNews of {title}.\n\nPorter:\nKnock, knock, {title}!\n")
    assert load_dataset(f"shakespeare:{tmp_path},length=5,users=play").user_ids.tolist() == [0] * 6 + [1] * 7
    assert torch.bincount(load_dataset(f"shakespeare:{tmp_path},length=5").user_ids).tolist() == [2, 4, 3, 4]
    (tmp_path / "macbeth.txt").unlink()
    assert load_dataset(f"shakespeare:{tmp_path},length=5,users=play").user_ids.tolist() == [0] * 6


def test_a_text_without_a_known_first_speech_is_rejected(tmp_path):
    (tmp_path / "input.txt").write_text(PLAY)
    with pytest.raises(
        ArgumentError, match="shakespeare: path: .*expected the first speech of one of Coriolanus.*Romeo"
    ):
        load_dataset(f"shakespeare:{tmp_path},users=play")
    with pytest.raises(ArgumentError, match="users: expected one of speaker, play"):
        load_dataset(f"shakespeare:{tmp_path},users=act")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match=r"expected a file input.txt or shakespeare.txt, or plays in .txt files"):
        load_dataset(f"shakespeare:{tmp_path}/empty")


def test_tiny_shakespeare_has_nine_plays():
    folder = Path("build/data/tinyshakespeare")
    if not folder.is_dir():
        pytest.skip("tiny Shakespeare is not available")
    made = load_dataset(f"shakespeare:{folder},users=play")
    counts = torch.bincount(made.user_ids)
    assert len(counts) == len(PLAY_OPENINGS) == 9
    # The last play, The Tempest, is incomplete in this file.
    assert counts.argmin() == 8


@pytest.mark.parametrize("model", ["gru:hidden=8,layers=2", "transformer:width=8,heads=2,layers=1"])
def test_models_learn_text_with_one_client_per_speaker(tmp_path, model):
    (tmp_path / "input.txt").write_text(PLAY + "\n\n".join(f"Voice {i}:\n{'to be or not ' * 6}" for i in range(4)))
    made = load_dataset(f"shakespeare:{tmp_path},length=8", model)
    federation = FederatedDataset.split(made, 3, partition=natural_partition, seed=0, batch=4)
    assert [len(set(made.user_ids[part].tolist())) for part in federation.train] == [1, 1, 1]
    found = run(federation, Method("FedAsync", rules.FedAsync(0.5), clients.Local(epochs=2, rate=0.01)), num_updates=12)
    assert found.rejected == 0
    assert found.accuracy[-1] > found.accuracy[0]


def test_transformer_is_causal():
    torch.manual_seed(0)
    model = models.transformer(Signature((6,), 9, 9, per_token=True), width=8, heads=2, layers=2)
    tokens = torch.arange(6)[None] % 9
    later = tokens.clone()
    later[0, 4:] = 0
    here, there = model(tokens), model(later)
    torch.testing.assert_close(here[..., :4], there[..., :4])
    assert not torch.allclose(here[..., 4:], there[..., 4:])


@pytest.mark.parametrize(
    "make",
    [
        partial(models.gru, Signature((5,), 7, 7, per_token=True), hidden=6),
        partial(models.transformer, Signature((5,), 7, 7), width=8, heads=2),
        partial(models.mlp, Signature((5,), 7)),
        partial(models.cnn, Signature((3, 9, 11), 7), norm="group"),
        partial(models.cnn, Signature((1, 4, 4), 7), width=3, norm="batch"),
    ],
    ids=["gru", "transformer", "mlp", "cnn group", "cnn batch"],
)
def test_the_loss_of_a_point_equals_the_loss_of_the_loaded_model(make):
    """A recurrent layer stores a second list of its weights. Loading a point must update this list as well."""
    torch.manual_seed(0)
    model = make()
    of = make.args[0]
    inputs = torch.randint(0, of.tokens, (4, *of.shape)) if of.tokens else torch.randn(4, *of.shape)
    labels = torch.randint(0, of.classes, (4, *of.shape) if of.per_token else (4,))
    space = ParameterSpace.of(model)
    theta = space.point(model) + 0.1
    loss = space.loss(model, nn.functional.cross_entropy)(theta, (inputs, labels))
    space.load(model, theta)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(model(inputs), labels))


def leaf_folder(folder, part, users):
    (folder / part).mkdir(parents=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
    (folder / part / "all_data_0.json").write_text(json.dumps(content))


def test_leaf_data_has_users_and_a_test_split(tmp_path):
    image = [i / 784 for i in range(784)]
    leaf_folder(tmp_path, "train", {"f1": ([image, image], [3, 61]), "f2": ([image], [0])})
    leaf_folder(tmp_path, "test", {"f2": ([image], [5]), "f3": ([image], [1])})
    made = load_dataset(f"leaf:{tmp_path}")
    assert made.inputs.shape == (5, 1, 28, 28)
    assert made.labels.tolist() == [3, 61, 0, 5, 1]
    assert made.user_ids.tolist() == [0, 0, 1, 1, 2]
    assert made.test_mask.tolist() == [False, False, False, True, True]
    assert made.model()(made.inputs).shape == (5, 62)


def test_leaf_hierarchies_can_be_the_users(tmp_path):
    leaf_folder(
        tmp_path, "train", {"ACT_A": ([[1.0], [2.0]], [0, 1]), "ACT_B": ([[3.0]], [1]), "BET_A": ([[4.0]], [0])}
    )
    file = tmp_path / "train" / "all_data_0.json"
    with pytest.raises(ArgumentError, match="missing key 'hierarchies'"):
        load_dataset(f"leaf:{tmp_path},users=hierarchy")
    content = json.loads(file.read_text()) | {"hierarchies": ["ACT", "ACT", "BET"]}
    file.write_text(json.dumps(content))
    assert load_dataset(f"leaf:{tmp_path},users=hierarchy").user_ids.tolist() == [0, 0, 0, 1]
    assert load_dataset(f"leaf:{tmp_path}").user_ids.tolist() == [0, 0, 1, 2]
    file.write_text(json.dumps(content | {"hierarchies": ["ACT"]}))
    with pytest.raises(ArgumentError, match="expected JSON with users"):
        load_dataset(f"leaf:{tmp_path},users=hierarchy")


def test_leaf_text_is_labelled_with_the_next_character(tmp_path):
    leaf_folder(tmp_path, "train", {"one": (["abca", "bcab"], ["b", "c"])})
    made = load_dataset(f"leaf:{tmp_path}")
    assert made.inputs.tolist() == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert made.labels.tolist() == [1, 2]
    assert made.test_mask is None
    assert made.model()(made.inputs).shape == (2, 3)


def test_leaf_folder_without_training_samples_has_no_test_split(tmp_path):
    leaf_folder(tmp_path, "test", {"one": ([[1.0], [2.0]], [0, 1]), "two": ([[3.0]], [1])})
    assert load_dataset(f"leaf:{tmp_path}").test_mask is None


def test_numeric_leaf_samples_may_have_character_labels(tmp_path):
    leaf_folder(tmp_path, "train", {"one": ([[1.0], [2.0]], ["b", "a"])})
    made = load_dataset(f"leaf:{tmp_path}")
    assert made.labels.tolist() == [1, 0]
    assert made.model()(made.inputs).shape == (2, 2)


def test_utf_8_byte_order_mark_is_ignored(tmp_path):
    (tmp_path / "plain.txt").write_text(PLAY, encoding="utf-8")
    (tmp_path / "marked.txt").write_text(PLAY, encoding="utf-8-sig")
    plain, marked = (load_dataset(f"shakespeare:{tmp_path}/{name}.txt,length=5") for name in ("plain", "marked"))
    assert marked.signature == plain.signature
    assert torch.equal(marked.inputs, plain.inputs)
    assert torch.equal(marked.user_ids, plain.user_ids)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2", "expected JSON with users"),
        ('{"users": ["a"]}', "missing key 'user_data'"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1, 2]}}}', "lists x and y of equal length"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [1, 2]], "y": [1, 2]}}}', "of equal length"),
        ('{"users": ["a"], "user_data": {"a": {"x": [["q"]], "y": [1]}}}', "lists of numbers"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[NaN]], "y": [1]}}}', "finite numbers"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1.5]}}}', "expected all y to be integers"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [true]}}}', "expected all y to be integers"),
        ('{"users": [], "user_data": {}}', "expected samples"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["ab", "ba"], "y": ["ab", "a"]}}}', "all y to be integers"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["ab", "ba"], "y": ["", "a"]}}}', "all y to be integers"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["ab", "ba"], "y": ["a", 1]}}}', "all y to be integers"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1' + 30 * "0" + "]}}}", "below 2"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1' + 5000 * "0" + "]}}}", "expected JSON"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1' + 400 * "0" + ']], "y": [1]}}}', "lists of numbers"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1e300]], "y": [1]}}}', "finite numbers, or strings"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["", ""], "y": [0, 1]}}}', "non-empty lists"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[], []], "y": [0, 1]}}}', "non-empty lists"),
        (100_000 * "[", "expected JSON"),
    ],
    ids=range(19),
)
def test_invalid_leaf_json_is_rejected(tmp_path, content, said):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ArgumentError, match=f"data: leaf: folder: {tmp_path}.*{said}"):
        load_dataset(f"leaf:{tmp_path}")


def test_npz_file_defines_a_dataset(tmp_path):
    place = tmp_path / "mine.npz"
    inputs = np.random.default_rng(0).normal(size=(6, 3))
    test = np.arange(6) > 3
    np.savez(place, inputs=inputs, labels=[0, 1, 2, 0, 1, 2], user_ids=["b", "a", "b", "a", "b", "a"], test_mask=test)
    made = load_dataset(f"npz:{place}")
    assert made.name == "mine"
    assert made.user_ids.tolist() == [1, 0, 1, 0, 1, 0]
    assert made.test_mask.tolist() == test.tolist()
    assert made.model()(made.inputs).shape == (6, 3)
    np.savez(place, inputs=np.array([[1, 2], [0, 1]]), labels=np.array([[2, 0], [1, 2]]))
    assert load_dataset(f"npz:{place}").model()(torch.tensor([[1, 2]])).shape == (1, 3, 2)


def test_npz_file_with_a_label_matrix_is_a_multi_label_dataset(tmp_path):
    file = tmp_path / "mine.npz"
    inputs, labels = np.random.default_rng(0).normal(size=(6, 3)), np.eye(3)[[0, 1, 2, 0, 1, 2]]
    for kind in (bool, np.float64):
        np.savez(file, inputs=inputs, labels=labels.astype(kind))
        made = load_dataset(f"npz:{file}")
        assert made.labels.dtype == torch.float32
        assert made.criterion is binary_cross_entropy_with_logits
        assert list(made.metrics) == ["AUROC", "AUPRC"]
        assert made.model()(made.inputs).shape == (6, 3)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"inputs": np.ones((2, 3))}, "expected an array 'labels'"),
        (
            {"inputs": np.ones((2, 3)), "labels": np.zeros(2, int), "label": np.zeros(2)},
            "no array 'label'; did you mean labels",
        ),
        ({"inputs": np.ones((2, 3)), "labels": np.zeros(3, int)}, "labels: expected int64"),
        ({"inputs": np.ones((2, 3)), "labels": np.zeros(2)}, "labels: expected integers"),
        ({"inputs": np.ones((2, 3)), "labels": np.array([0, -1])}, "labels: expected integers"),
        ({"inputs": np.full((2, 3), np.nan), "labels": np.zeros(2, int)}, "finite"),
        ({"inputs": np.ones(2), "labels": np.zeros(2, int)}, "inputs: expected numbers"),
        ({"inputs": np.ones((2, 3)), "labels": np.zeros(2, int), "user_ids": np.zeros(3)}, "user_ids: expected"),
        ({"inputs": np.array([[None], [1]]), "labels": np.zeros(2, int)}, "without objects"),
        (
            {"inputs": np.ones((2, 3)), "labels": np.zeros(2, int), "test_mask": ["True", "False"]},
            "test_mask: expected booleans",
        ),
        ({"inputs": np.ones((2, 3)), "labels": np.zeros(2, int), "test_mask": [0, 3]}, "test_mask: expected booleans"),
        ({"inputs": np.ones((2, 3)), "labels": np.array([0, 2**63 + 5], np.uint64)}, "labels: expected integers"),
        ({"inputs": np.ones((2, 3)), "labels": np.array([0, 2**31])}, "labels: expected integers .* below 2"),
        ({"inputs": np.array([[1, 2], [3, 2**62]]), "labels": np.zeros(2, int)}, "inputs: expected tokens below 2"),
        ({"inputs": np.array([[1, 2], [3, 2**63 + 1]], np.uint64), "labels": np.zeros(2, int)}, "tokens below 2"),
        (
            {"inputs": np.full((2, 3), 1e300), "labels": np.zeros(2, int)},
            "inputs: expected numbers that are finite in float32",
        ),
        ({"inputs": np.ones((2, 0)), "labels": np.zeros(2, int)}, "inputs: expected numbers"),
        ({"inputs": np.ones((2, 1, 8, 8)), "labels": np.zeros((2, 1), int)}, "labels: expected int64"),
        ({"inputs": np.ones((2, 3)), "labels": np.zeros((2, 3), int)}, "labels: expected int64"),
        ({"inputs": np.ones((2, 1)), "labels": np.zeros((2, 1), int)}, "labels: expected int64"),
    ],
)
def test_invalid_npz_arrays_are_rejected(tmp_path, arrays, said):
    place = tmp_path / "bad.npz"
    np.savez(place, **arrays)
    with pytest.raises(ArgumentError, match=f"data: npz: .*{said}"):
        load_dataset(f"npz:{place}")


def test_a_user_module_defines_a_dataset(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from manifoldagg.simulation import LabelledDataset\n"
        "def task(count=8):\n"
        "    return LabelledDataset('points', torch.zeros(count, 2), torch.arange(count) % 2, lambda: nn.Linear(2, 2), 1.0)\n"
        "made = task()\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("task", "made"):
        found = load_dataset(f"my_data:{name}")
        assert found.name == "points"
        back = pickle.loads(pickle.dumps(found))
        assert back.labels.tolist() == found.labels.tolist()
        assert [p.shape for p in back.model().parameters()] == [p.shape for p in found.model().parameters()]
        assert not isinstance(sys.modules["my_data"].made.model, type(found.model))
    assert len(load_dataset("my_data:task:count=6").labels) == 6
    for name, said in (
        ("number", "expected a LabelledDataset, or a class or function that makes one, got 3"),
        ("other", "expected a name that the module my_data defines, got 'other'"),
    ):
        with pytest.raises(ArgumentError, match=f"data: my_data:{name}: .*{said}"):
            load_dataset(f"my_data:{name}")


@pytest.mark.parametrize(
    ("source", "model", "said"),
    [
        ("digitz", None, "no data set 'digitz'; did you mean digits"),
        ("nowhere:task", None, "or an importable module, got 'nowhere'"),
        ("idx", None, "^data: expected idx:FOLDER, .* got 'idx'"),
        (
            "mnist",
            None,
            "^data: expected idx:FOLDER, with the files train-images-idx3-ubyte, .* does not download data",
        ),
        ("FashionMNIST", None, "^data: expected idx:FOLDER, "),
        ("Fashion-MNIST", None, "did you mean fashion-mnist"),
        ("fashion-mnist:folder=/nowhere", None, "install them with `apt-get install dataset-fashion-mnist`"),
        ("femnist", None, "^data: expected leaf:FOLDER, "),
        ("shakespeare", None, "^data: expected shakespeare:FILE, .* got 'shakespeare'"),
        ("idx:/nowhere", None, "expected one of the files"),
        ("idx:/nowhere,part=test", None, "part: expected one of"),
        ("npz:/nowhere.npz", None, "cannot be read"),
        ("leaf:/nowhere", None, "got a folder without JSON files"),
        ("shakespeare:/nowhere", None, "cannot be read"),
        ("digits", "cnm", "no model 'cnm'; did you mean cnn"),
        ("digits", "gru", "model: gru: expected a data set of token sequences"),
        ("digits", "cnn:norm=layer", "model: cnn: norm: expected one of"),
        ("digits", "mlp:hidden=0", "model: mlp: hidden"),
        ("digits", "mlp:signature=3", "no option 'signature'"),
    ],
)
def test_invalid_data_and_model_names_are_rejected(source, model, said):
    with pytest.raises(ArgumentError, match=said):
        load_dataset(source, model)


def test_a_dataset_with_a_named_model_can_be_pickled():
    made = load_dataset("digits", "mlp:hidden=5")
    back = pickle.loads(pickle.dumps(made))
    assert [p.shape for p in back.model().parameters()] == [p.shape for p in made.model().parameters()]


def test_validation_samples_come_from_the_training_set_only():
    made = load_dataset("digits")
    plain = FederatedDataset.split(made, 5, partition=iid_partition, seed=1)
    tuning = FederatedDataset.split(made, 5, partition=iid_partition, seed=1, validation=0.25)
    for i in range(5):
        assert sorted([*tuning.train[i], *tuning.held_out[i]]) == plain.train[i].tolist()
        assert len(tuning.held_out[i]) == round(0.25 * len(plain.train[i]))
        assert not set(tuning.held_out[i]) & set(plain.held_out[i])
    back = pickle.loads(pickle.dumps(tuning))
    assert all((a == b).all() for a, b in zip(back.train, tuning.train, strict=True))


def test_natural_partition_requires_an_owner_for_each_client():
    made = LabelledDataset("points", torch.zeros(4, 2), torch.arange(4) % 2, lambda: nn.Linear(2, 2), 1.0)
    with pytest.raises(ArgumentError, match="user_ids: expected the owner of each sample"):
        FederatedDataset.split(made, 2, partition=natural_partition, seed=0)
    owned = LabelledDataset(
        "points", torch.zeros(4, 2), torch.arange(4) % 2, lambda: nn.Linear(2, 2), 1.0, torch.tensor([0, 0, 1, 1])
    )
    with pytest.raises(ArgumentError, match="clients: expected at most one for each of 2 owners, got 3"):
        FederatedDataset.split(owned, 3, partition=natural_partition, seed=0)


def points(samples, **known):
    labels = torch.arange(samples) % 2
    return LabelledDataset("points", torch.zeros(samples, 2), labels, lambda: nn.Linear(2, 2), 1.0, **known)


@pytest.mark.parametrize("known", [{}, {"user_ids": torch.arange(20) % 2}], ids=["unknown", "others"])
def test_user_ids_of_the_partition_override_those_of_the_dataset(known):
    mine = np.arange(20) // 10
    made = FederatedDataset.split(points(20, **known), 2, partition=partial(natural_partition, user_ids=mine), seed=0)
    parts = [sorted([*a, *b]) for a, b in zip(made.train, made.held_out, strict=True)]
    assert parts == [list(range(10)), list(range(10, 20))]


def test_partition_without_user_ids_uses_those_of_the_dataset():
    made = FederatedDataset.split(
        points(20, user_ids=torch.arange(20) % 2), 2, partition=partial(natural_partition, user_ids=None), seed=0
    )
    assert [set(part % 2) for part in made.train] == [{0}, {1}]


def test_splits_without_training_samples_are_rejected():
    with pytest.raises(
        ArgumentError,
        match="clients: expected clients with enough samples to hold out a fraction of 0.9 .*, got 5 clients",
    ):
        FederatedDataset.split(points(5), 5, partition=iid_partition, seed=0, holdout=0.9)
    with pytest.raises(
        ArgumentError,
        match="clients: expected clients with enough samples to hold out a fraction of 0.9 .*, got 5 clients",
    ):
        FederatedDataset.split(points(10), 5, partition=iid_partition, seed=0, holdout=0.5, validation=0.9)
    tested = points(6, test_mask=torch.ones(6, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="clients: expected clients with samples outside of the test split"):
        FederatedDataset.split(tested, 2, partition=iid_partition, seed=0)


def test_natural_partition_selects_the_largest_or_random_owners():
    owners = np.repeat(np.arange(5), [3, 9, 1, 7, 5])
    labels = np.zeros(len(owners), int)
    parts = natural_partition(labels, 3, np.random.default_rng(0), user_ids=owners)
    assert [owners[part].tolist() for part in parts] == [[1] * 9, [3] * 7, [4] * 5]
    seen = set()
    for seed in range(30):
        drawn = natural_partition(labels, 3, np.random.default_rng(seed), user_ids=owners, selection="random")
        seen |= {int(owners[part[0]]) for part in drawn}
        assert all(
            set(owners[part]) == {owners[part[0]]} and len(part) == (owners == owners[part[0]]).sum() for part in drawn
        )
    assert seen == set(range(5))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": np.ones((2, 3))}, r"inputs: expected a Tensor, got .*torch.as_tensor\(inputs\)"),
        ({"labels": np.zeros(2, int)}, r"labels: expected a Tensor, got .*torch.as_tensor\(labels\)"),
        ({"model": nn.Linear(3, 2)}, "model: expected a function that creates a module, got a module"),
    ],
)
def test_label_data_set_rejects_arrays_and_modules(changes, words):
    fields = {
        "inputs": torch.ones(2, 3),
        "labels": torch.zeros(2, dtype=torch.int64),
        "model": partial(nn.Linear, 3, 2),
    }
    with pytest.raises(ArgumentError, match=words):
        LabelledDataset("own", target=0.5, **(fields | changes))
