"""Ask the running `serve_rag` questions, and measure its sources, its citations and its answers."""

from raymill.job import Job, connect
from raymill.rag.options import EvaluateRagOptions

JOB = Job(EvaluateRagOptions, "evaluate_rag")  # reads the options, before the slow imports below

import asyncio

from raymill import settings
from raymill.errors import UserError
from raymill.rag import deployment, evaluation, hit_rate
from raymill.rag.evaluation import Question
from raymill.serving import preflight


def main(options: EvaluateRagOptions) -> None:
    """Ask the questions, write one line per answer to the output, and print a table."""
    preflight.check_api_key()
    questions = hit_rate.load_questions(options.questions, Question, "evaluate_rag")
    if not questions:
        raise UserError(f"{options.questions} has no questions. Pass another file with --questions.")
    connect(log_to_driver=False)
    answers = asyncio.run(evaluation.ask_all(deployment.running_url(), questions, options.at_once))
    output = settings.resolve(options.output)
    evaluation.save(answers, output)
    evaluation.print_table(answers)
    print(f"the answers and their scores are in {output}", flush=True)


JOB.run(main)
