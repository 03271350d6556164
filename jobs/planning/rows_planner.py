"""Planning some rows of the input: rendered, tokenized, and ready to be sorted. It keeps no state between runs."""

import pickle
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...engine.errors import InvalidRequestError
from ...engine.text.tokenizer import Tokenizer
from ...storage.readers import InputRow, is_unicode
from ...storage.rows.columns import custom_id_of, own_custom_id
from ...storage.rows.external_sort import Item
from ...storage.rows.spool import PlannedRow
from ..errors import RowError
from ..shards.row_sampling import RowSampling
from ..spec.row_images import NamedFile
from .image_marks import marked, unmarked
from .rendering import IllustratedPrompt, PromptRenderer

# How the error of a prompt begins that is too long for the model.
TOO_LONG = "prompt has"


class PlannedRun(NamedTuple):
    """Rows that follow each other in the input.

    `items`: one a row, as `ExternalSorter` takes them. `own_ids`: of those that bring a `custom_id`, by row number.
    `errors`: the numbers of those that can not be asked. `answer_tokens`: the most that the answers may have together
    of rows that say themselves how they are sampled.
    """

    items: list[Item]
    own_ids: dict[int, str]
    errors: frozenset[int]
    answer_tokens: int


@dataclass(frozen=True)
class RowsPlanner:
    """`context`: how many tokens a prompt and its answer may have together."""

    renderer: PromptRenderer
    tokenizer: Tokenizer
    context: int

    def plan(self, rows: Sequence[InputRow]) -> PlannedRun:
        """What is wrong with a row becomes its error."""
        own_ids: dict[int, str] = {}
        errors = set()
        items = []
        answer_tokens = 0
        illustrated: dict[int, IllustratedPrompt] = {}
        for place, (row, prompt) in enumerate(zip(rows, self._prompts(rows, illustrated), strict=True)):
            if (own_id := own_custom_id(row.values)) is not None:
                own_ids[row.row] = own_id
            problem = prompt if isinstance(prompt, str) else self._length_error(len(prompt))
            if problem is not None:
                errors.add(row.row)
                items.append(_item(row, (), problem))
                continue
            assert not isinstance(prompt, str)
            if (shown := illustrated.get(place)) is not None:
                items.append(_illustrated_item(row, prompt, self._beside(shown), shown, self._image_token_id))
            else:
                items.append(_item(row, prompt, None))
            if row.sampling is not None:
                answer_tokens += self._answer_tokens(row.sampling, len(prompt))
        return PlannedRun(items, own_ids, frozenset(errors), answer_tokens)

    @property
    def _image_token_id(self) -> int:
        vision = self.renderer.images.vision
        assert vision is not None
        return vision.image_token_id

    def _beside(self, shown: IllustratedPrompt) -> list[bytes | None]:
        """The files of a row's images that its spooled columns do not have."""
        # The spool has an id of its own in the place of the input's.
        has_columns = self.renderer.image_column != "custom_id"
        return [None if has_columns and not isinstance(file, NamedFile) else bytes(file) for file in shown.files]

    def _prompts(
        self, rows: Sequence[InputRow], illustrated: dict[int, IllustratedPrompt]
    ) -> list[str | Sequence[int]]:
        """Each row's tokens, or its error; notes by their places which prompts have images."""
        prompts: list[str | Sequence[int]] = []
        texts: list[str] = []
        places: list[int] = []
        for row in rows:
            try:
                prompt = self._render(row)
            except RowError as error:
                prompts.append(str(error))
                continue
            if isinstance(prompt, IllustratedPrompt):
                illustrated[len(prompts)] = prompt
                prompt = prompt.text
            if isinstance(prompt, str):
                places.append(len(prompts))
                texts.append(prompt)
            prompts.append(prompt)
        encoded = self.tokenizer.encode_arrays(texts, self.renderer.adds_special_tokens)
        for place, token_ids in zip(places, encoded, strict=True):
            prompts[place] = token_ids
        for place, prompt in illustrated.items():
            prompts[place] = self._expanded(prompts[place], prompt)
        return prompts

    def _expanded(self, prompt: str | Sequence[int], shown: IllustratedPrompt) -> str | Sequence[int]:
        assert not isinstance(prompt, str)
        try:
            return self.renderer.images.expanded(prompt, shown.grids, self._check_length)
        except InvalidRequestError as error:
            return str(error)

    def _render(self, row: InputRow) -> str | list[int] | IllustratedPrompt:
        if row.error is not None:
            raise RowError(row.error)
        prompt = self.renderer.render(row.values)
        text = prompt.text if isinstance(prompt, IllustratedPrompt) else prompt
        if isinstance(text, str):
            self._check_size(len(text))
            # JSON within a column can spell it.
            if not is_unicode(text):
                raise RowError("prompt is not valid text: an escape is half of a surrogate pair")
        return prompt

    def _check_length(self, num_tokens: int) -> None:
        if (problem := self._length_error(num_tokens)) is not None:
            raise InvalidRequestError(problem)

    def _length_error(self, num_tokens: int) -> str | None:
        if num_tokens == 0:
            return "prompt is empty"
        if num_tokens >= self.context:
            return f"{TOO_LONG} {num_tokens} tokens; the model's context holds {self.context} with the answer"
        return None

    def _check_size(self, num_characters: int) -> None:
        """Refuse a text that is too long however it is tokenized: doing it takes dozens of bytes a character."""
        fewest = self.tokenizer.fewest_tokens(num_characters, self.context)
        if fewest >= self.context:
            raise RowError(
                f"{TOO_LONG} at least {fewest} tokens; the model's context holds {self.context} with the answer"
            )

    def _answer_tokens(self, row_sampling: str, num_prompt_tokens: int) -> int:
        """The most that a row's answers may have."""
        sampling = RowSampling.model_validate_json(row_sampling).sampling
        return sampling.n * min(sampling.max_tokens, self.context - num_prompt_tokens)


def _item(row: InputRow, token_ids: Sequence[int], error: str | None) -> Item:
    """The tokens as the key, so that prompts with a long common beginning are neighbours.

    Rows without tokens come first: they cost the engine nothing.
    """
    payload = (row.row, row.values, error, row.sampling)
    return _big_endian(array("i", token_ids)).tobytes(), pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)


def _illustrated_item(
    row: InputRow,
    token_ids: Sequence[int],
    beside: Sequence[bytes | None],
    shown: IllustratedPrompt,
    image_token_id: int,
) -> Item:
    """As `_item`; neighbours have the same images too."""
    payload = (row.row, row.values, None, row.sampling, image_token_id, beside)
    key = _big_endian(marked(token_ids, shown, image_token_id)).tobytes()
    return key, pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)


def planned_row(item: Item) -> PlannedRow:
    """The row that an item was made of."""
    key, payload = item
    number, values, error, sampling, *shown = pickle.loads(payload)
    token_ids = None if error else _big_endian(array("i", key))
    row = PlannedRow(number, custom_id_of(values, number), values, token_ids, error, sampling)
    if not shown or token_ids is None:
        return row
    image_token_id, files = shown
    return row._replace(prompt_token_ids=unmarked(token_ids, image_token_id), images=files)


def row_number(item: Item) -> int:
    """The number of the row that an item was made of."""
    number: int = pickle.loads(item[1])[0]
    return number


def _big_endian(token_ids: "array[int]") -> "array[int]":
    """Turned from this machine's order of bytes to big-endian, or back: as bytes, they then sort as numbers do."""
    if sys.byteorder == "little":
        token_ids.byteswap()
    return token_ids
