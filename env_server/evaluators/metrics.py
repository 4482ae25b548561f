"""Every metric by its OSWorld name."""

from collections.abc import Callable, Mapping

from env_server.evaluators import desktop_metrics, file_metrics, text_metrics, windows_metrics

METRICS: Mapping[str, Callable[..., float]] = {
    function.__name__: function
    for function in (
        text_metrics.check_direct_json_object,
        text_metrics.check_include_exclude,
        text_metrics.exact_match,
        text_metrics.fuzzy_match,
        text_metrics.is_in_list,
        text_metrics.is_in_vm_clickboard,
        text_metrics.literal_match,
        text_metrics.match_in_list,
        file_metrics.check_csv,
        file_metrics.check_json,
        file_metrics.check_line_number,
        file_metrics.check_list,
        file_metrics.compare_result_files,
        file_metrics.compare_text_file,
        file_metrics.diff_text_file,
        file_metrics.file_contains,
        desktop_metrics.check_gnome_favorite_apps,
        desktop_metrics.check_moved_jpgs,
        desktop_metrics.check_text_enlarged,
        desktop_metrics.is_utc_0,
        windows_metrics.windows_date_format,
        windows_metrics.windows_exact_match,
        windows_metrics.windows_has_all,
        windows_metrics.windows_names_listed,
        windows_metrics.windows_non_empty,
    )
}
