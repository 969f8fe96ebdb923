"""Published sentences about normalization, each tested by an ablation: `python ablate.py claim NAME`.

A study is a file of data, such as `lns.py`, and a section of `page.md` with the quoted sentence and the
question. What is measured without training is a function in the same file. `study.py` says what a study is, and has
what several share. `command.py` measures, `verdict.py` judges, and `page.py` writes CLAIMS.md.
"""
