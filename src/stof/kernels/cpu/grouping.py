"""Like steps run as one: the same height and width, at even distances, become one batch of one fused call.

Every call of PyTorch's fused attention costs some set-up and leaves a core idle at its end; a window mask at S = 4096
would make 128 of them. Contiguous columns are batched as overlapping strided views, without a copy.
"""

from __future__ import annotations

# Bounds the temporaries of one batch: output rows, and gathered key columns.
MAX_ROWS = 2048
MAX_GATHERED_COLUMNS = 1024

# Fields of one step. A step is one attention call over some rows and columns of one pattern.
(
    PATTERN,
    ROW_START,
    ROW_STOP,
    FIRST_COLUMN,
    COLUMN_OFFSET,
    COLUMNS,
    MASK_OFFSET,
    EMPTY_ROWS,
    MERGE,
    GROUP,
) = range(10)
FIELDS = 10

Step = list[int]


def group_steps(steps: list[Step]) -> list[list[Step]]:
    """Steps of one pattern in the order to run them: writes first, then merges; each inner list is one batch.

    Steps of a batch have equal heights, widths and kind; their rows are evenly spaced and, where they are contiguous,
    so are their columns.
    """
    batches: list[list[Step]] = []
    alike: dict[tuple[object, ...], list[Step]] = {}
    for step in sorted(steps, key=lambda step: (step[MERGE], step[ROW_START])):
        contiguous = step[FIRST_COLUMN] >= 0
        height = step[ROW_STOP] - step[ROW_START]
        # Gathered steps may have a mask each; contiguous ones share one, as windows and documents do.
        mask = step[MASK_OFFSET] if contiguous else step[MASK_OFFSET] >= 0
        key = (step[MERGE], height, step[COLUMNS], contiguous, mask, step[EMPTY_ROWS])
        held = alike.get(key)
        if held is not None and step[COLUMNS] and _continues(held, step, contiguous, height):
            held.append(step)
        else:
            alike[key] = [step]
            batches.append(alike[key])
    return sorted(batches, key=lambda batch: batch[0][MERGE])


def _continues(held: list[Step], step: Step, contiguous: bool, height: int) -> bool:
    size = len(held) + 1
    if size * height > MAX_ROWS or (not contiguous and size * step[COLUMNS] > MAX_GATHERED_COLUMNS):
        return False
    if len(held) == 1:
        return step[ROW_START] - held[0][ROW_START] >= height and step[FIRST_COLUMN] >= held[0][FIRST_COLUMN]
    return all(step[n] - held[-1][n] == held[1][n] - held[0][n] for n in (ROW_START, FIRST_COLUMN))
