//! The report: one HTML file that shows a plan, without any server or network.
//!
//! The page's own sources (`page.html`, `page.css`, `page.js`) are embedded; [`data`] makes the JSON that it draws.

pub mod data;

use crate::failure::Failure;

/// The page for some data.
pub fn page(data: &data::Data) -> Result<String, Failure> {
    // No `</script>` or `<!--` of a string may be seen as HTML.
    let json = serde_json::to_string(data).map_err(Failure::new)?.replace('<', "\\u003c");
    Ok(include_str!("page.html")
        .replace("/*STYLE*/", include_str!("page.css"))
        .replace("/*SCRIPT*/", include_str!("page.js"))
        .replace("/*DATA*/", &json))
}
