//! The `#[profiled]` attribute of `tracing-profiling`, which re-exports and documents it.

#![forbid(unsafe_code)]

mod awaits;

use proc_macro2::{Group, TokenStream};
use quote::{ToTokens, quote};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{
    Attribute, Error, Expr, Ident, LitStr, Path, ReturnType, Signature, Token, Type, Visibility,
    parenthesized, parse_quote,
};

/// See `tracing_profiling::profiled`.
#[proc_macro_attribute]
pub fn profiled(
    arguments: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    expand(arguments.into(), item.into()).into()
}

/// Expands to `tracing::instrument`, with the settings in the name of a field that never has a value. They are
/// then part of the callsite's metadata, where the layer reads them once and other layers see no value.
fn expand(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let checked = syn::parse2::<Arguments>(arguments)
        .and_then(|arguments| Ok((arguments, syn::parse2::<Function>(item.clone())?)));
    match checked {
        Ok((arguments, function)) => {
            let marker = arguments.marker().map(|name| quote!({#name} = ::tracing::field::Empty,));
            let Arguments { on_error, off, fields, others, has_err, krate, .. } = arguments;
            let krate = krate.unwrap_or_else(|| parse_quote!(::tracing_profiling));
            let item = match off {
                Some(_) => item,
                None => awaits::wrap(item, function.is_async, &function.output, &krate),
            };
            let needs_err = on_error && function.returns_result && !has_err;
            let item = if needs_err { warn_of_missing_err(item) } else { item };
            quote! {
                #[::tracing::instrument(#(#others,)* fields(#marker #fields))]
                #item
            }
        }
        Err(error) => {
            // Keeps the function, so that its uses cause no further errors.
            let error = error.to_compile_error();
            quote!(#error #item)
        }
    }
}

/// Adds to the function's body what makes the compiler warn. Macros can emit no warnings themselves.
fn warn_of_missing_err(item: TokenStream) -> TokenStream {
    awaits::with_body(item, |statements| {
        // Inner attributes must come first.
        (!awaits::has_inner_attributes(&statements)).then(|| {
            quote! {
                const _: () = {
                    #[deprecated(note = "`on_error` does not keep a function that returns `Err` without `err`, which \
                        records the error: write `#[profiled(on_error, err)]`")]
                    const ON_ERROR_WITHOUT_ERR: () = ();
                    ON_ERROR_WITHOUT_ERR
                };
                #statements
            }
        })
    })
}

/// The arguments of the attribute.
#[derive(Default)]
struct Arguments {
    threshold_ns: Option<u64>,
    on_error: bool,
    off: Option<Ident>,
    /// The content of `fields(...)`, if present.
    fields: Option<TokenStream>,
    /// All other arguments of `instrument`.
    others: Vec<TokenStream>,
    /// Whether `err` is among them.
    has_err: bool,
    /// The path of `tracing_profiling`, if it has another name.
    krate: Option<Path>,
}

/// The arguments of `instrument` in tracing 0.1, which only warns about others.
const FOR_INSTRUMENT: [&str; 9] =
    ["name", "target", "parent", "follows_from", "level", "skip", "skip_all", "err", "ret"];
const EXPECTED: &str = "unknown argument: expected `threshold`, `on_error`, `off` or `crate`, or an \
    argument of `tracing::instrument`";

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut arguments = Self::default();
        while !input.is_empty() {
            if input.peek(LitStr) {
                arguments.others.push(input.parse::<LitStr>()?.into_token_stream());
            } else {
                // `crate` is a keyword.
                let name =
                    Ident::parse_any(input).map_err(|error| Error::new(error.span(), EXPECTED))?;
                arguments.parse_named(&name, input)?;
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        if let Some(off) = &arguments.off
            && (arguments.threshold_ns.is_some() || arguments.on_error)
        {
            let problem = "`off` cannot be combined with `threshold` or `on_error`";
            return Err(Error::new(off.span(), problem));
        }
        Ok(arguments)
    }
}

impl Arguments {
    /// What `instrument` does not have, as a field name that `keep::candidates` of `tracing-profiling` parses.
    fn marker(&self) -> Option<String> {
        let threshold = self.threshold_ns.map(|ns| format!("threshold_ns={ns}"));
        let on_error = self.on_error.then(|| "on_error".to_owned());
        let off = self.off.as_ref().map(|_| "off".to_owned());
        let words: Vec<_> = [threshold, on_error, off].into_iter().flatten().collect();
        (!words.is_empty()).then(|| format!("tracing_profiling {}", words.join(" ")))
    }

    fn parse_named(&mut self, name: &Ident, input: ParseStream<'_>) -> syn::Result<()> {
        let once = |is_first: bool| match is_first {
            true => Ok(()),
            false => Err(Error::new(name.span(), format!("duplicate argument `{name}`"))),
        };
        match name.to_string().as_str() {
            "threshold" => {
                once(self.threshold_ns.is_none())?;
                input.parse::<Token![=]>()?;
                self.threshold_ns = Some(threshold(input)?);
            }
            "on_error" => {
                once(!self.on_error)?;
                self.on_error = true;
            }
            "off" => {
                once(self.off.is_none())?;
                self.off = Some(name.clone());
            }
            "crate" => {
                once(self.krate.is_none())?;
                input.parse::<Token![=]>()?;
                self.krate = Some(match input.peek(LitStr) {
                    true => input.parse::<LitStr>()?.parse()?,
                    false => input.parse()?,
                });
            }
            "fields" => {
                once(self.fields.is_none())?;
                let content;
                parenthesized!(content in input);
                self.fields = Some(content.parse()?);
            }
            known if FOR_INSTRUMENT.contains(&known) => {
                self.has_err |= known == "err";
                self.others.push(for_instrument(name, input)?);
            }
            _ => return Err(Error::new(name.span(), EXPECTED)),
        }
        Ok(())
    }
}

/// `name`, `name = EXPRESSION` or `name(...)`, to be parsed by `instrument`.
fn for_instrument(name: &Ident, input: ParseStream<'_>) -> syn::Result<TokenStream> {
    if input.peek(Token![=]) {
        let equals: Token![=] = input.parse()?;
        let value: Expr = input.parse()?;
        return Ok(quote!(#name #equals #value));
    }
    if input.peek(syn::token::Paren) {
        let arguments: Group = input.parse()?;
        return Ok(quote!(#name #arguments));
    }
    Ok(name.to_token_stream())
}

fn threshold(input: ParseStream<'_>) -> syn::Result<u64> {
    const FORM: &str = "expected a duration in quotes, such as \"50ms\"";
    let literal: LitStr = input.parse().map_err(|error| Error::new(error.span(), FORM))?;
    let duration = humantime::parse_duration(&literal.value())
        .map_err(|error| Error::new(literal.span(), format!("{FORM}: {error}")))?;
    u64::try_from(duration.as_nanos())
        .map_err(|_| Error::new(literal.span(), "the threshold must be shorter than 584 years"))
}

/// The annotated item, parsed as far as needed here.
struct Function {
    is_async: bool,
    output: ReturnType,
    returns_result: bool,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        const FORM: &str = "#[profiled] can only be applied to a function";
        let outside = |error: Error| Error::new(error.span(), FORM);
        input.call(Attribute::parse_outer)?;
        input.parse::<Visibility>()?;
        if input.peek(Ident) && input.fork().parse::<Ident>()? == "default" {
            input.parse::<Ident>()?;
        }
        let signature: Signature = input.parse().map_err(outside)?;
        if let Some(keyword) = signature.constness {
            return Err(Error::new(
                keyword.span(),
                "a `const fn` may be evaluated at compile time, without spans: remove `const` or \
                 #[profiled]",
            ));
        }
        if !input.peek(syn::token::Brace) {
            return Err(Error::new(
                signature.span(),
                "#[profiled] needs a function with a body: apply it to the implementation",
            ));
        }
        input.parse::<TokenStream>()?;
        let returns_result = if let ReturnType::Type(_, returned) = &signature.output
            && let Type::Path(path) = &**returned
        {
            path.path.segments.last().is_some_and(|last| last.ident == "Result")
        } else {
            false
        };
        let is_async = signature.asyncness.is_some();
        Ok(Self { is_async, output: signature.output, returns_result })
    }
}
