"""Text as tokens: the corpus, files, bytes, characters, a tokenizer, hidden tokens."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from curvoscope.errors import EmptyError, RangeError
from curvoscope.families.text import TextError, corpus, cut, encode, hide, read


class Words:
    """A tokenizer of whole words."""

    about = "one token a word"

    def __init__(self, mask=None):
        self.mask = mask

    def encode(self, text):
        return [len(word) for word in text.split()]


def test_the_corpus_is_english_prose_without_repetition():
    text = corpus()
    assert 10_000 < len(text) < 20_000 and text.isascii()
    words = text.lower().split()
    assert len(set(words)) > 600
    assert Counter(words).most_common(1)[0][0] == "the"
    sentences = [sentence.strip() for sentence in text.replace("\n", " ").split(".") if sentence.strip()]
    assert len(set(sentences)) == len(sentences) > 100


class TestFiles:
    def test_read(self, tmp_path):
        file = tmp_path / "words.txt"
        file.write_text("Grüße, ∇f", encoding="utf-8")
        assert read(file) == "Grüße, ∇f"

    def test_what_cannot_be_read(self, tmp_path):
        with pytest.raises(TextError, match=r"text: cannot read .*none\.txt: No such file"):
            read(tmp_path / "none.txt")
        with pytest.raises(TextError, match="cannot read"):
            read(tmp_path)
        (tmp_path / "bytes").write_bytes(b"abc\xff\xfe")
        with pytest.raises(TextError, match="not UTF-8 text: byte 3 is 255"):
            read(tmp_path / "bytes")
        (tmp_path / "blank").write_text(" \n\n")
        with pytest.raises(EmptyError, match="no words"):
            read(tmp_path / "blank")


class TestTokens:
    @given(st.text(min_size=1))
    def test_bytes_give_the_text_back(self, text):
        found = encode(text, 256)
        assert bytes(found.tokens.tolist()).decode() == text
        assert found.mask is None and found.about == "one token per byte"

    def test_bytes_and_a_mask_need_one_more(self):
        assert encode("abc", 257, masked=True).mask == 256
        found = encode("abc", 256, masked=True)
        assert found.mask == 255 and "frequent" in found.about and int(found.tokens.max()) < 255

    @pytest.mark.parametrize("masked", [False, True])
    def test_a_small_vocabulary_has_the_most_frequent_characters(self, masked):
        text = "aaaa bbb cc d"
        found = encode(text, 4 + masked, masked=masked)
        number = dict(zip(text, found.tokens.tolist(), strict=True))
        assert {number["a"], number["b"], number[" "]} == {0, 1, 2}
        assert number["c"] == number["d"] == 3  # all others
        assert found.mask == (4 if masked else None)
        assert "3 most frequent characters" in found.about and f"({3 / 13:.1%} of the text)" in found.about

    def test_ties_do_not_depend_on_the_order_of_the_text(self):
        first, second = encode("xyz", 3), encode("zyx", 3)
        assert first.tokens.tolist() == second.tokens.tolist()[::-1]

    def test_characters_that_all_fit(self):
        assert "others" not in encode("abab", 5).about

    def test_a_vocabulary_for_nothing(self):
        with pytest.raises(RangeError, match="vocabulary: got 2, expected at least 3"):
            encode("abc", 2, masked=True)

    def test_a_tokenizer(self):
        found = encode("one three fifteen", 10, Words(mask=9), masked=True)
        assert (found.tokens.tolist(), found.mask, found.about) == ([3, 5, 7], 9, "one token a word")

    def test_a_tokenizer_of_another_model(self):
        with pytest.raises(TextError, match="gives token 7, the model has 7"):
            encode("one three fifteen", 7, Words())
        with pytest.raises(TextError, match="no mask token"):
            encode("one", 7, Words(), masked=True)
        with pytest.raises(EmptyError, match="no tokens"):
            encode(" ", 7, Words())


class TestCut:
    def test_consecutive(self):
        assert cut(torch.arange(10), 3, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]

    def test_too_much(self):
        with pytest.raises(TextError, match="has 10 tokens, 4 sequences of 3 need 12"):
            cut(torch.arange(10), 4, 3)
        for arguments, name in (((0, 3), "sequences"), ((3, 1), "length")):
            with pytest.raises(RangeError, match=f"{name}: got {min(arguments)}"):
                cut(torch.arange(10), *arguments)


class TestHide:
    def test_labels_are_what_is_hidden(self):
        tokens = torch.arange(200).view(4, 50)
        inputs, labels = hide(tokens, 999, seed=3)
        hidden = inputs == 999
        assert int(hidden.sum()) == 30
        assert torch.equal(labels[hidden], tokens[hidden]) and bool((labels[~hidden] == -100).all())
        assert torch.equal(inputs[~hidden], tokens[~hidden])

    def test_a_function_of_the_seed_alone(self):
        tokens, before = torch.arange(200).view(4, 50), torch.random.get_rng_state()
        assert torch.equal(hide(tokens, 999, seed=3)[0], hide(tokens, 999, seed=3)[0])
        assert not torch.equal(hide(tokens, 999, seed=3)[0], hide(tokens, 999, seed=4)[0])
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_one_at_least(self):
        assert int((hide(torch.tensor([[1, 2]]), 9)[0] == 9).sum()) == 1
