"""Published sentences about normalization, each tested by an ablation: `python ablate.py claim NAME`.

A study is data in `trained.py` or `untrained.py`, and a section of `page.md` with the quoted sentence and the question.
`study.py` says what a study is. `command.py` measures, and `page.py` judges and writes CLAIMS.md.
"""
